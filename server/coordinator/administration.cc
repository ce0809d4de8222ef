#include "server/coordinator/administration.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "server/coordinator/statistics.h"
#include "server/ops/logging.h"
#include "server/ops/metric_registry.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

v1::GetStatusResponse Administration::GetStatus(rpc::CallContext* context) {
  v1::GetStatusResponse response = parts_.coordinator->GetStatus(context);
  response.set_draining(draining());
  return response;
}

absl::StatusOr<v1::GetLimitsResponse> Administration::GetLimits(const v1::GetLimitsRequest& request,
                                                                rpc::CallContext* context) {
  return parts_.coordinator->GetLimits(request, context);
}

absl::StatusOr<v1::GetStatsResponse> Administration::GetStats(const v1::GetStatsRequest& request,
                                                              rpc::CallContext* context) {
  if (absl::Status status = CheckHotRows(request.hot_rows()); !status.ok()) return status;
  Coordinator& coordinator = *parts_.coordinator;
  v1::GetStatsResponse response;
  // Shards first: what takes time must not make the rest old.
  coordinator.AddShards(request.hot_rows(), context, response.mutable_shards());
  const ops::MetricSnapshot metrics(coordinator.metrics()->collectables());
  response.set_time_ms(absl::ToUnixMillis(absl::Now()));
  response.set_uptime_ms(absl::ToInt64Milliseconds(coordinator.uptime()));

  response.set_draining(parts_.drain->draining());
  response.set_in_flight_requests(InFlightRequests());
  response.set_in_flight_bytes(parts_.admission->bytes());
  response.set_in_flight_budget_bytes(parts_.in_flight_budget_bytes);
  response.set_queued_requests(parts_.pool->queued());
  response.set_train_streams(parts_.train_streams->count());
  response.set_batches(static_cast<int>(coordinator.resources().batches->count()));
  response.set_batch_bytes(coordinator.resources().batches->bytes());
  response.set_batch_budget_bytes(parts_.batch_budget_bytes);
  AddMethodStats(metrics, &response);
  AddStageStats(metrics, &response);
  coordinator.AddStacks(&response);
  AddGroupStats(metrics, &response);
  return response;
}

bool Administration::draining() const { return parts_.drain->draining(); }

int Administration::InFlightRequests() const {
  // A stream is admitted a little before it is counted and a little longer. One that was refused is
  // counted, but not admitted, until it is over.
  return std::max(parts_.admission->requests() - parts_.train_streams->count(), 0);
}

void Administration::SetDraining(bool draining) {
  if (parts_.drain->draining() != draining) {
    ops::Log(ops::LogLevel::kInfo, draining ? "draining" : "in service again");
  }
  parts_.drain->Set(draining);
  parts_.show_health();
  parts_.train_streams->SetDraining(draining);
  parts_.coordinator->server_metrics()->SetDraining(draining);
}

void Administration::Stop() {
  absl::MutexLock lock(&drain_mutex_);
  stopped_ = true;
  SetDraining(true);
}

absl::StatusOr<v1::DrainResponse> Administration::Drain(const v1::DrainRequest& request) {
  {
    absl::MutexLock lock(&drain_mutex_);
    if (request.undo() && stopped_) {
      return absl::FailedPreconditionError(
          "undo: the coordinator is stopping and cannot be put back into service");
    }
    SetDraining(!request.undo());
  }
  v1::DrainResponse response;
  response.set_draining(parts_.drain->draining());
  response.set_in_flight_requests(InFlightRequests());
  response.set_train_streams(parts_.train_streams->count());
  response.set_batches(static_cast<int>(parts_.coordinator->resources().batches->count()));
  return response;
}

}  // namespace emberd::server
