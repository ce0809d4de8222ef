#include "server/ops/metric_registry.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>
#include <type_traits>
#include <utility>

namespace emberd::ops {
namespace {

prometheus::Labels MakeLabels(MetricId id, const std::vector<std::string>& values) {
  const std::vector<std::string> names = Describe(id).LabelNames();
  if (names.size() != values.size()) {
    std::fprintf(stderr, "metric %s has %zu labels, got %zu\n", Describe(id).name.data(),
                 names.size(), values.size());
    std::abort();
  }
  prometheus::Labels labels;
  for (size_t i = 0; i < names.size(); ++i) labels[names[i]] = values[i];
  return labels;
}

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

}  // namespace

MetricRegistry::MetricRegistry() : registry_(std::make_shared<prometheus::Registry>()) {
  for (const MetricInfo& metric : MetricCatalogue()) {
    const auto add = [&](auto builder) {
      builder.Name(std::string(metric.name)).Help(std::string(metric.help));
      families_.emplace_back(&builder.Register(*registry_));
    };
    switch (metric.type) {
      case MetricType::kCounter:
        add(prometheus::BuildCounter());
        break;
      case MetricType::kGauge:
        add(prometheus::BuildGauge());
        break;
      case MetricType::kHistogram:
        add(prometheus::BuildHistogram());
        break;
    }
  }
}

MetricRegistry::Child MetricRegistry::Get(MetricId id, const std::vector<std::string>& values) {
  const auto add = [&](auto* family) -> Child {
    if constexpr (std::is_same_v<decltype(family), prometheus::Family<prometheus::Histogram>*>) {
      return &family->Add(MakeLabels(id, values), BucketBounds(Describe(id)));
    } else {
      return &family->Add(MakeLabels(id, values));
    }
  };
  return std::visit(add, families_[static_cast<size_t>(id)]);
}

MetricSnapshot::MetricSnapshot(
    const std::vector<std::weak_ptr<prometheus::Collectable>>& collectables)
    : series_(MetricCatalogue().size()) {
  std::map<std::string_view, const MetricInfo*> by_name;
  for (const MetricInfo& metric : MetricCatalogue()) by_name[metric.name] = &metric;
  for (const auto& weak : collectables) {
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
      std::sort(all.begin(), all.end(),
                [](const Series& a, const Series& b) { return a.labels < b.labels; });
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
