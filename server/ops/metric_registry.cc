#include "server/ops/metric_registry.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>

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

}  // namespace

MetricRegistry::MetricRegistry() : registry_(std::make_shared<prometheus::Registry>()) {
  for (const MetricInfo& metric : MetricCatalogue()) {
    const std::string name(metric.name);
    const std::string help(metric.help);
    switch (metric.type) {
      case MetricType::kCounter:
        families_.emplace_back(
            &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_));
        break;
      case MetricType::kGauge:
        families_.emplace_back(
            &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_));
        break;
      case MetricType::kHistogram:
        families_.emplace_back(
            &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_));
        break;
    }
  }
}

prometheus::Counter& MetricRegistry::counter(MetricId id, const std::vector<std::string>& values) {
  auto* family = std::get<prometheus::Family<prometheus::Counter>*>(families_[size_t(id)]);
  return family->Add(MakeLabels(id, values));
}

prometheus::Gauge& MetricRegistry::gauge(MetricId id, const std::vector<std::string>& values) {
  auto* family = std::get<prometheus::Family<prometheus::Gauge>*>(families_[size_t(id)]);
  return family->Add(MakeLabels(id, values));
}

prometheus::Histogram& MetricRegistry::histogram(MetricId id,
                                                 const std::vector<std::string>& values) {
  auto* family = std::get<prometheus::Family<prometheus::Histogram>*>(families_[size_t(id)]);
  return family->Add(MakeLabels(id, values), BucketBounds(Describe(id)));
}

}  // namespace emberd::ops
