// The catalogue's metrics as prometheus-cpp families.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

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

  prometheus::Counter& counter(MetricId id, const std::vector<std::string>& label_values);
  prometheus::Gauge& gauge(MetricId id, const std::vector<std::string>& label_values);
  prometheus::Histogram& histogram(MetricId id, const std::vector<std::string>& label_values);

  std::shared_ptr<prometheus::Collectable> collectable() const { return registry_; }

 private:
  using Family =
      std::variant<prometheus::Family<prometheus::Counter>*, prometheus::Family<prometheus::Gauge>*,
                   prometheus::Family<prometheus::Histogram>*>;

  std::shared_ptr<prometheus::Registry> registry_;
  std::vector<Family> families_;  // by MetricId
};

}  // namespace emberd::ops
