// What operators ask of a coordinator: AdminService serves it, and so does the status page.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "emberd/v1/admin_service.pb.h"
#include "server/base/admission.h"
#include "server/base/worker_pool.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/train/train_stream.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// Thread-safe. Methods block for as long as shards take to answer, about a second at most.
class Administration {
 public:
  struct Parts {
    Coordinator* coordinator = nullptr;
    const WorkerPool* pool = nullptr;      // where its requests run
    const Admission* admission = nullptr;  // of its requests
    const TrainStreams* train_streams = nullptr;
    int64_t in_flight_budget_bytes = 0;
    int64_t batch_budget_bytes = 0;
  };
  // What `parts` points to must outlive it.
  explicit Administration(const Parts& parts) : parts_(parts) {}

  v1::GetStatusResponse GetStatus(rpc::CallContext* context);
  absl::StatusOr<v1::GetLimitsResponse> GetLimits(const v1::GetLimitsRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<v1::GetStatsResponse> GetStats(const v1::GetStatsRequest& request,
                                                rpc::CallContext* context);

 private:
  const Parts parts_;
};

}  // namespace emberd::server
