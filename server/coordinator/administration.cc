#include "server/coordinator/administration.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "base/status.h"
#include "server/coordinator/checkpoints.h"
#include "server/host/shard_backend.h"
#include "server/ops/catalogue.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {
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

// Every RPC that has been called.
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

void AddModelStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats) {
  for (const Series& examples : metrics.All(MetricId::kExamples)) {
    v1::ModelStats* const to = stats->add_models();
    to->set_model(examples.labels[0]);
    to->set_examples(static_cast<int64_t>(examples.value));
  }
}

// Every stage.
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

}  // namespace

absl::StatusOr<v1::GetStatusResponse> Administration::GetStatus(const v1::GetStatusRequest&,
                                                                rpc::CallContext* context) {
  v1::GetStatusResponse response = parts_.coordinator->GetStatus(context);
  response.set_draining(draining());
  return response;
}

absl::StatusOr<v1::GetStatsResponse> Administration::GetStats(const v1::GetStatsRequest& request,
                                                              rpc::CallContext* context) {
  RETURN_IF_ERROR(host::CheckHotRows(request.hot_rows()));
  Coordinator& coordinator = *parts_.coordinator;
  v1::GetStatsResponse response;
  // Shards first: what takes time must not make the rest old.
  if (!request.without_shards()) {
    coordinator.AddShards(request.hot_rows(), context, response.mutable_shards());
  }
  const ops::MetricSnapshot metrics(coordinator.resources().metrics->collectables());
  response.set_time_ms(absl::ToUnixMillis(absl::Now()));  // a date
  response.set_uptime_ms(absl::ToInt64Milliseconds(coordinator.uptime()));

  response.set_draining(parts_.draining->load());
  response.set_in_flight_requests(InFlightRequests());
  response.set_in_flight_bytes(parts_.admission->bytes());
  response.set_in_flight_budget_bytes(parts_.in_flight_budget_bytes);
  response.set_queued_requests(parts_.queue->queued());
  response.set_train_streams(parts_.train_streams->count());
  response.set_batches(static_cast<int>(coordinator.resources().path->batches().count()));
  response.set_batch_bytes(coordinator.resources().path->batches().bytes());
  response.set_batch_budget_bytes(parts_.batch_budget_bytes);
  AddMethodStats(metrics, &response);
  AddStageStats(metrics, &response);
  coordinator.AddStacks(&response);
  AddGroupStats(metrics, &response);
  AddModelStats(metrics, &response);
  return response;
}

bool Administration::draining() const { return parts_.draining->load(); }

int Administration::InFlightRequests() const {
  // A stream is admitted a little before it is counted and a little longer. One that was refused is
  // counted, but not admitted, until it is over.
  return std::max(parts_.admission->requests() - parts_.train_streams->count(), 0);
}

void Administration::SetDraining(bool draining) {
  if (parts_.draining->load() != draining) {
    ops::Log(ops::LogLevel::kInfo, draining ? "draining" : "in service again");
  }
  parts_.draining->store(draining);
  parts_.show_health();
  parts_.train_streams->SetDraining(draining);
  parts_.coordinator->resources().server_metrics->Set(ops::MetricId::kDraining, draining ? 1 : 0);
}

void Administration::Stop() {
  absl::MutexLock lock(&drain_mutex_);
  stopped_ = true;
  SetDraining(true);
}

absl::StatusOr<v1::DrainResponse> Administration::Drain(const v1::DrainRequest& request,
                                                        rpc::CallContext*) {
  {
    absl::MutexLock lock(&drain_mutex_);
    if (request.undo() && stopped_) {
      return absl::FailedPreconditionError(
          "undo: the coordinator is stopping and cannot be put back into service");
    }
    SetDraining(!request.undo());
  }
  v1::DrainResponse response;
  response.set_draining(parts_.draining->load());
  // Streams first: what one has asked for is counted below when it has gone.
  response.set_train_streams(parts_.train_streams->count());
  response.set_in_flight_requests(InFlightRequests() + parts_.checkpoint_admission->requests() +
                                  parts_.coordinator->resources().checkpoints->unfinished());
  response.set_batches(static_cast<int>(parts_.coordinator->resources().path->batches().count()));
  return response;
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
    const auto by_rank = [&](MetricId id, google::protobuf::Map<std::string, int64_t>* counts) {
      for (const Series& rank : metrics.All(id)) {
        if (IsOf(rank, group)) (*counts)[rank.labels[2]] = static_cast<int64_t>(rank.value);
      }
    };
    by_rank(MetricId::kGroupLastArrivals, to->mutable_last_arrivals());
    by_rank(MetricId::kGroupDroppedIds, to->mutable_dropped_ids());
    const Series* const waits =
        metrics.Find(MetricId::kGroupStageSeconds, {group[0], group[1], "wait_for_ranks"});
    if (waits != nullptr) to->set_wait_seconds(waits->histogram.sample_sum);
  }
}

}  // namespace emberd::coordinator
