// What operators ask of a coordinator's process. AdminService serves it, and the status page; what
// they ask of the cluster is Coordinator's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/thread_pools.h"
#include "emberd/v1/admin_service.pb.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/train/train_stream.h"
#include "server/ops/metrics.h"
#include "server/ops/samples.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {

// Thread-safe. Methods block for as long as shards take to answer: about a second at most.
class Administration {
 public:
  struct Parts {
    Coordinator* coordinator = nullptr;
    const TaskQueue* queue = nullptr;                      // where its requests run
    const rpc::Admission* admission = nullptr;             // of its requests
    const rpc::Admission* checkpoint_admission = nullptr;  // of those of CheckpointService
    TrainStreams* train_streams = nullptr;
    std::atomic<bool>* draining = nullptr;
    const ops::Samples* samples = nullptr;  // of the calls of ProgramService
    std::function<void()> show_health;      // brings the health service up to date
    int64_t in_flight_budget_bytes = 0;
    int64_t batch_budget_bytes = 0;
  };
  // What `parts` points to must outlive it.
  explicit Administration(const Parts& parts) : parts_(parts) {}

  absl::StatusOr<v1::GetStatusResponse> GetStatus(const v1::GetStatusRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<v1::GetMetricsResponse> GetMetrics(const v1::GetMetricsRequest& request,
                                                    rpc::CallContext*) {
    return parts_.samples->Get(request.regex());
  }
  absl::StatusOr<v1::GetStatsResponse> GetStats(const v1::GetStatsRequest& request,
                                                rpc::CallContext* context);
  // Takes the coordinator out of service or back into it, and tells what is left to do.
  // FAILED_PRECONDITION: back into service after Stop.
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request,
                                          rpc::CallContext* context);
  // Takes it out of service for good, as its process is about to end.
  void Stop();
  // Out of service by Drain or Stop.
  bool draining() const;

 private:
  void SetDraining(bool draining) ABSL_EXCLUSIVE_LOCKS_REQUIRED(drain_mutex_);
  // Requests in work, besides training streams.
  int InFlightRequests() const;

  const Parts parts_;
  absl::Mutex drain_mutex_;  // one change of service at a time
  bool stopped_ ABSL_GUARDED_BY(drain_mutex_) = false;
};

// Adds to `stats` every group that has had ranks here.
void AddGroupStats(const ops::MetricSnapshot& metrics, v1::GetStatsResponse* stats);

}  // namespace emberd::coordinator
