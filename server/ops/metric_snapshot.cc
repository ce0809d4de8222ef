#include "server/ops/metric_snapshot.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

namespace emberd::ops {
namespace {

MetricSnapshot::Series MakeSeries(const MetricInfo& metric, prometheus::ClientMetric from) {
  MetricSnapshot::Series series;
  for (const std::string& name : metric.LabelNames()) {
    const auto found = std::find_if(from.label.begin(), from.label.end(),
                                    [&](const auto& label) { return label.name == name; });
    series.labels.push_back(found == from.label.end() ? "" : found->value);
  }
  series.value = metric.type == MetricType::kGauge ? from.gauge.value : from.counter.value;
  series.histogram = std::move(from.histogram);
  return series;
}

bool ByLabels(const MetricSnapshot::Series& a, const MetricSnapshot::Series& b) {
  return a.labels < b.labels;
}

}  // namespace

MetricSnapshot::MetricSnapshot(const Metrics& metrics) : series_(MetricCatalogue().size()) {
  std::map<std::string_view, const MetricInfo*> by_name;
  for (const MetricInfo& metric : MetricCatalogue()) by_name[metric.name] = &metric;
  for (const auto& weak : metrics.collectables()) {
    const auto collectable = weak.lock();
    if (collectable == nullptr) continue;
    for (prometheus::MetricFamily& family : collectable->Collect()) {
      const auto found = by_name.find(family.name);
      if (found == by_name.end()) continue;
      const MetricInfo& metric = *found->second;
      std::vector<Series>& all = series_[static_cast<size_t>(metric.id)];
      for (prometheus::ClientMetric& from : family.metric) {
        all.push_back(MakeSeries(metric, std::move(from)));
      }
      std::sort(all.begin(), all.end(), ByLabels);
    }
  }
}

const MetricSnapshot::Series* MetricSnapshot::Find(MetricId id,
                                                   const std::vector<std::string>& labels) const {
  const std::vector<Series>& all = All(id);
  const auto found = std::lower_bound(
      all.begin(), all.end(), labels,
      [](const Series& series, const auto& wanted) { return series.labels < wanted; });
  return found == all.end() || found->labels != labels ? nullptr : &*found;
}

double MetricSnapshot::Value(MetricId id, const std::vector<std::string>& labels) const {
  const Series* const series = Find(id, labels);
  return series == nullptr ? 0 : series->value;
}

}  // namespace emberd::ops
