#include "server/coordinator/statistics.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/ops/rpc_names.h"

namespace emberd::server {
namespace {

using ops::MetricId;
using Series = ops::MetricSnapshot::Series;

void FillDistribution(const prometheus::ClientMetric::Histogram& histogram, v1::Distribution* to) {
  to->set_count(static_cast<int64_t>(histogram.sample_count));
  to->set_sum(histogram.sample_sum);
  for (const auto& from : histogram.bucket) {
    v1::Distribution::Bucket* bucket = to->add_buckets();
    bucket->set_upper(from.upper_bound);
    bucket->set_count(static_cast<int64_t>(from.cumulative_count));
  }
}

// Whether the first labels of a series are those of a group.
bool IsOf(const Series& series, const std::vector<std::string>& group) {
  return series.labels[0] == group[0] && series.labels[1] == group[1];
}

}  // namespace

void AddMethodStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats) {
  for (size_t i = 0; i < ops::kRpcCount; ++i) {
    const std::string method(ops::RpcName(static_cast<ops::Rpc>(i)));
    const Series* const seconds = metrics.Find(MetricId::kRpcSeconds, {method});
    // A stream that goes on has no duration yet, but bytes.
    if (seconds == nullptr && metrics.Find(MetricId::kRpcRequestBytes, {method}) == nullptr) {
      continue;
    }
    v1::MethodStats* to = stats->add_methods();
    to->set_method(method);
    v1::Distribution* duration = to->mutable_seconds();
    if (seconds != nullptr) FillDistribution(seconds->histogram, duration);
    const auto value = [&](MetricId id) {
      return static_cast<int64_t>(metrics.Value(id, {method}));
    };
    to->set_request_bytes(value(MetricId::kRpcRequestBytes));
    to->set_response_bytes(value(MetricId::kRpcResponseBytes));
    for (const Series& calls : metrics.All(MetricId::kRpcs)) {
      if (calls.labels[0] != method) continue;
      (*to->mutable_codes())[calls.labels[1]] = static_cast<int64_t>(calls.value);
    }
  }
}

void AddStageStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats) {
  for (size_t i = 0; i < ops::kStageCount; ++i) {
    const std::string stage(ops::StageName(static_cast<ops::Stage>(i)));
    const Series* const seconds = metrics.Find(MetricId::kStageSeconds, {stage});
    if (seconds == nullptr) continue;
    v1::StageStats* to = stats->add_stages();
    to->set_stage(stage);
    FillDistribution(seconds->histogram, to->mutable_seconds());
  }
}

void AddGroupStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats) {
  for (const Series& updates : metrics.All(MetricId::kGroupSteps)) {
    const std::vector<std::string>& group = updates.labels;
    v1::GroupStats* to = stats->add_groups();
    to->set_model(group[0]);
    to->set_group(group[1]);
    to->set_updates(static_cast<int64_t>(updates.value));
    int64_t failures = 0;
    for (const Series& ended : metrics.All(MetricId::kGroupFailures)) {
      if (IsOf(ended, group)) failures += static_cast<int64_t>(ended.value);
    }
    to->set_failures(failures);
    for (const Series& last : metrics.All(MetricId::kGroupLastArrivals)) {
      if (!IsOf(last, group)) continue;
      (*to->mutable_last_arrivals())[last.labels[2]] = static_cast<int64_t>(last.value);
    }
    const Series* const waits =
        metrics.Find(MetricId::kGroupStageSeconds, {group[0], group[1], "wait_for_ranks"});
    if (waits != nullptr) to->set_wait_seconds(waits->histogram.sample_sum);
  }
}

}  // namespace emberd::server
