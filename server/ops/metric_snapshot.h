// What the metrics of a process say at one moment, by the catalogue's entries, for those who read
// them in the process itself.
#pragma once

#include <string>
#include <vector>

#include <prometheus/client_metric.h>

#include "server/ops/metric_catalogue.h"
#include "server/ops/metrics.h"

namespace emberd::ops {

class MetricSnapshot {
 public:
  struct Series {
    std::vector<std::string> labels;  // values, in the catalogue's order
    double value = 0;                 // of a counter or gauge
    prometheus::ClientMetric::Histogram histogram;
  };

  explicit MetricSnapshot(const Metrics& metrics);

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
