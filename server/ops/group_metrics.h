// What a coordinator reports about one training group: the part of it that the coordinator serves.
#pragma once

#include <array>
#include <string>

#include <prometheus/counter.h>
#include <prometheus/histogram.h>

#include "absl/status/status.h"
#include "emberd/v1/train.pb.h"
#include "server/ops/metric_registry.h"

namespace emberd::ops {

// Thread-safe. Made by Metrics::Group.
class GroupMetrics {
 public:
  // Ranks with a series of their own; what comes later is "other".
  static constexpr int kMaxRankLabels = 64;

  GroupMetrics(MetricRegistry& registry, const std::string& model, const std::string& group);

  void ObserveLookup(const v1::StepTimes& times);
  void ObserveUpdate(const v1::StepTimes& times);
  // A stream that ended with an error.
  void AddFailure(absl::StatusCode code);

 private:
  // What both kinds of request have.
  void ObserveWaits(const v1::StepTimes& times);

  MetricRegistry& registry_;
  const std::string model_;
  const std::string group_;
  prometheus::Counter& steps_;
  prometheus::Histogram& preprocess_;
  prometheus::Histogram& wait_for_ranks_;
  prometheus::Histogram& wait_for_update_;
  prometheus::Histogram& gather_;
  prometheus::Histogram& combine_;
  prometheus::Histogram& apply_;
};

}  // namespace emberd::ops
