#include "server/ops/samples.h"

#include <algorithm>
#include <cmath>

#include <re2/re2.h>

#include "absl/strings/str_cat.h"

namespace emberd::ops {
namespace {

constexpr double kPercents[] = {25, 50, 80, 90, 95, 99};
constexpr int64_t kExpressionMemory = 1 << 20;

// Of at least one value, in ascending order.
v1::SampledMetric Describe(const std::vector<double>& sorted) {
  v1::SampledMetric metric;
  const auto count = static_cast<int64_t>(sorted.size());
  const auto n = static_cast<double>(count);
  double sum = 0;
  for (const double value : sorted) sum += value;
  const double mean = sum / n;
  double squares = 0;
  for (const double value : sorted) squares += (value - mean) * (value - mean);
  metric.set_unit("seconds");
  metric.set_count(count);
  metric.set_min(sorted.front());
  metric.set_max(sorted.back());
  metric.set_mean(mean);
  metric.set_standard_deviation(std::sqrt(squares / n));
  for (const double percent : kPercents) {
    const auto rank = static_cast<int64_t>(std::ceil(percent / 100 * n));
    v1::SampledMetric::Percentile* percentile = metric.add_percentiles();
    percentile->set_percent(percent);
    percentile->set_value(sorted[std::clamp<int64_t>(rank, 1, count) - 1]);
  }
  return metric;
}

}  // namespace

void Samples::Add(std::string_view name, double seconds) {
  absl::MutexLock lock(&mutex_);
  auto found = windows_.find(name);
  if (found == windows_.end()) found = windows_.emplace(std::string(name), Window()).first;
  Window& window = found->second;
  if (window.values.size() < kNewest) {
    window.values.push_back(seconds);
  } else {
    window.values[window.total % kNewest] = seconds;
  }
  ++window.total;
}

absl::StatusOr<v1::GetMetricsResponse> Samples::Get(const std::string& regex) const {
  RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(kExpressionMemory);
  const RE2 expression(regex, options);
  if (!expression.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("regex is '", regex, "': ", expression.error(),
                     "; it must be an expression of RE2, such as \"execute.*\", or empty"));
  }
  v1::GetMetricsResponse response;
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, window] : windows_) {
    if (!regex.empty() && !RE2::FullMatch(name, expression)) continue;
    std::vector<double> sorted = window.values;
    std::sort(sorted.begin(), sorted.end());
    v1::SampledMetric* metric = response.add_metrics();
    *metric = Describe(sorted);
    metric->set_name(name);
    metric->set_total(window.total);
  }
  return response;
}

}  // namespace emberd::ops
