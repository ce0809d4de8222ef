// The catalogue's metrics as prometheus-cpp families, and what they say at one moment.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include <prometheus/client_metric.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "server/ops/metric_catalogue.h"

namespace emberd::ops {

// Thread-safe. Children are made on first request and live as long as the registry. Looking one up
// takes a lock: keep the reference. Label values are given in the catalogue's order; another number
// of them, or another type than the catalogue's, is a mistake in the calling code and ends the
// process.
class MetricRegistry {
 public:
  MetricRegistry();

  // Nothing, or of the catalogue's type.
  using Child = std::variant<std::monostate, prometheus::Counter*, prometheus::Gauge*,
                             prometheus::Histogram*>;
  Child Get(MetricId id, const std::vector<std::string>& label_values);

  prometheus::Counter& counter(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Counter*>(Get(id, label_values));
  }
  prometheus::Gauge& gauge(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Gauge*>(Get(id, label_values));
  }
  prometheus::Histogram& histogram(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Histogram*>(Get(id, label_values));
  }

  std::shared_ptr<prometheus::Collectable> collectable() const { return registry_; }

 private:
  using Family =
      std::variant<prometheus::Family<prometheus::Counter>*, prometheus::Family<prometheus::Gauge>*,
                   prometheus::Family<prometheus::Histogram>*>;

  std::shared_ptr<prometheus::Registry> registry_;
  std::vector<Family> families_;  // by MetricId
};

// For those who read the metrics in the process itself.
class MetricSnapshot {
 public:
  struct Series {
    std::vector<std::string> labels;  // values, in the catalogue's order
    double value = 0;                 // of a counter or gauge
    prometheus::ClientMetric::Histogram histogram;
  };

  // Of what Metrics::collectables gives. Names that the catalogue does not have are left out.
  explicit MetricSnapshot(const std::vector<std::weak_ptr<prometheus::Collectable>>& collectables);

  // Those that exist so far, by labels.
  const std::vector<Series>& All(MetricId id) const { return series_[static_cast<size_t>(id)]; }
  // Null if there is none.
  const Series* Find(MetricId id, const std::vector<std::string>& labels) const;
  // 0 if there is none.
  double Value(MetricId id, const std::vector<std::string>& labels) const;

 private:
  std::vector<std::vector<Series>> series_;  // by MetricId
};

}  // namespace emberd::ops
