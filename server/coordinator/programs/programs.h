// Programs, batches and results of a coordinator, under their handles: the calls of ProgramService
// without their transport.
#pragma once

#include <atomic>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/periodic_task.h"
#include "base/thread_pools.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/chains.h"
#include "server/coordinator/programs/program_cache.h"
#include "server/coordinator/programs/values.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {

struct ProgramOptions {
  int coordinator_index = 0;
  absl::Duration lease;  // of handles, and of programs that are not among the newest
  CpuPool* cpu = nullptr;
  int64_t bytes_per_sparsecore = 0;  // for the rows of models, and for buffers of programs
  int64_t max_message_bytes = 0;     // of an answer
  const std::atomic<bool>* draining = nullptr;  // true: nothing is looked up; null: never true
};

// Thread-safe. Methods block until the answer is there. Errors: see program_service.proto.
class Programs {
 public:
  // What it is given must outlive it.
  Programs(const CoordinatorResources* resources, const ProgramOptions& options);

  absl::StatusOr<v1::CompileResponse> Compile(const v1::CompileRequest& request,
                                              rpc::CallContext* context);
  absl::StatusOr<v1::ReleaseResponse> Release(const v1::ReleaseRequest& request,
                                              rpc::CallContext* context);
  absl::StatusOr<v1::PrepareBatchResponse> PrepareBatch(v1::PrepareBatchRequest request,
                                                        rpc::CallContext* context);
  absl::StatusOr<v1::ExecuteResponse> Execute(v1::ExecuteRequest request,
                                              rpc::CallContext* context);
  absl::StatusOr<v1::ExecuteChainedResponse> ExecuteChained(v1::ExecuteChainedRequest request,
                                                            rpc::CallContext* context);
  absl::StatusOr<v1::ReadHandleResponse> ReadHandle(const v1::ReadHandleRequest& request,
                                                    rpc::CallContext* context);

  ops::Metrics* metrics() { return resources_->metrics; }

 private:
  void Sweep();
  // Tells the metrics what there is.
  void Count();
  // Checks a plan and runs it. Returns the share of the budget for the handles of its results.
  absl::StatusOr<rpc::BudgetShare> Run(const v1::ExecutionConfig& config, Chain* chain,
                                       rpc::CallContext* context);
  // The answer to an UPDATE whose handles are gone, because it has released them and its answer was
  // lost, or because they went with a coordinator. It comes from the record of updates; if that has
  // none, it is `no_handle`.
  absl::StatusOr<v1::ExecuteResponse> Repeat(const v1::ExecuteRequest& request,
                                             const Program& program, const absl::Status& no_handle,
                                             rpc::CallContext* context);
  // Under a new handle, or in the answer, as `config` says.
  v1::ProgramResult Give(const v1::ExecutionConfig& config, const ValuePtr& value,
                         const rpc::BudgetShare& share);

  const CoordinatorResources* const resources_;
  const ProgramOptions options_;
  ProgramRunner runner_;
  ProgramCache programs_;
  Handles handles_;
  PeriodicTask sweeper_;  // last: it ends before what it sweeps
};

}  // namespace emberd::coordinator
