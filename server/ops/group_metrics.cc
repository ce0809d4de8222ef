#include "server/ops/group_metrics.h"

#include "server/ops/rpc_names.h"

namespace emberd::ops {
namespace {

prometheus::Histogram& StageHistogram(MetricRegistry& registry, const std::string& model,
                                      const std::string& group, const char* stage) {
  return registry.histogram(MetricId::kGroupStageSeconds, {model, group, stage});
}

double Seconds(int64_t us) { return static_cast<double>(us) * 1e-6; }

}  // namespace

GroupMetrics::GroupMetrics(MetricRegistry& registry, const std::string& model,
                           const std::string& group)
    : registry_(registry),
      model_(model),
      group_(group),
      steps_(registry.counter(MetricId::kGroupSteps, {model, group})),
      preprocess_(StageHistogram(registry, model, group, "preprocess")),
      wait_for_ranks_(StageHistogram(registry, model, group, "wait_for_ranks")),
      wait_for_update_(StageHistogram(registry, model, group, "wait_for_update")),
      gather_(StageHistogram(registry, model, group, "gather")),
      combine_(StageHistogram(registry, model, group, "combine")),
      apply_(StageHistogram(registry, model, group, "apply")) {}

void GroupMetrics::ObserveLookup(const v1::StepTimes& times) {
  preprocess_.Observe(Seconds(times.preprocess_us()));
  gather_.Observe(Seconds(times.shards_us()));
  combine_.Observe(Seconds(times.combine_us()));
  ObserveWaits(times);
}

void GroupMetrics::ObserveUpdate(const v1::StepTimes& times) {
  steps_.Increment();
  apply_.Observe(Seconds(times.shards_us()));
  ObserveWaits(times);
}

void GroupMetrics::ObserveWaits(const v1::StepTimes& times) {
  wait_for_update_.Observe(Seconds(times.wait_for_update_us()));
  if (times.slowest_rank() < 0) return;
  wait_for_ranks_.Observe(Seconds(times.wait_for_ranks_us()));
  const std::string rank =
      times.slowest_rank() < kMaxRankLabels ? std::to_string(times.slowest_rank()) : "other";
  registry_.counter(MetricId::kGroupLastArrivals, {model_, group_, rank}).Increment();
}

void GroupMetrics::AddFailure(absl::StatusCode code) {
  registry_.counter(MetricId::kGroupFailures, {model_, group_, std::string(CodeName(code))})
      .Increment();
}

}  // namespace emberd::ops
