// One unary call whose work blocks: it waits in a TaskQueue, under budgets, with the caller's
// deadline and cancellation.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "base/steady_time.h"
#include "server/ops/metrics.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_context.h"
#include "server/rpc/spans.h"

namespace emberd::coordinator {

// Whether a coordinator takes what is new. Its process goes on either way.
// Thread-safe.
class DrainSwitch {
 public:
  bool draining() const { return draining_.load(); }
  void Set(bool draining) { draining_.store(draining); }

 private:
  std::atomic<bool> draining_ = false;
};

// For what is new. Clients that know of another coordinator turn to it on this code.
inline absl::Status DrainingError() {
  return absl::UnavailableError("the coordinator is draining; use another one");
}

class StreamWatch;

// What the calls of one service share.
struct CallEnvironment {
  TaskQueue* queue = nullptr;
  // What sets queue->max_queued(), for errors.
  absl::string_view waiting_limit = "budgets.max_waiting_requests";
  rpc::Admission* admission = nullptr;
  const DrainSwitch* drain = nullptr;  // null: everything is always taken
  ops::ServerMetrics* metrics = nullptr;
  absl::Duration default_deadline;  // for callers that send none
  absl::Duration slow_call;         // calls that take longer are logged
  StreamWatch* streams = nullptr;   // ends those that nobody reads; null: nothing does
};

// RESOURCE_EXHAUSTED for what finds no room in the environment's queue.
absl::Status QueueFullError(const CallEnvironment& environment);

// One line for a call that took longer than the environment's slow_call.
void LogSlowCall(const CallEnvironment& environment, ops::Rpc rpc, const absl::Status& status,
                 absl::Duration took, absl::string_view trace);

// The deadline of a call: the caller's, or the environment's default.
absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline);

// Deletes itself when the call is over.
class PooledCall final : public grpc::ServerUnaryReactor {
 public:
  // Fills the response and returns the status. `response_bytes` is for the metrics.
  using Work = std::function<absl::Status(rpc::CallContext* context, int64_t* response_bytes)>;

  static grpc::ServerUnaryReactor* Start(const CallEnvironment& environment,
                                         const grpc::CallbackServerContext& server_context,
                                         ops::Rpc rpc, int64_t request_bytes, Work work);

 private:
  PooledCall(const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
             ops::Rpc rpc, int64_t request_bytes);

  // Takes a place in the queue. UNAVAILABLE: the coordinator is draining. RESOURCE_EXHAUSTED: a
  // budget does not allow it, or the queue is so long that the caller would have given up before
  // the answer.
  absl::Status Enqueue(const std::string& client, Work work);
  void Run(const Work& work);
  // For what the work produces, which stays until the caller has been sent its answer.
  absl::StatusOr<rpc::CallContext::Room> MakeRoom(int64_t bytes, absl::string_view what);
  void End(const absl::Status& status);
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  const ops::Rpc rpc_;
  const int64_t request_bytes_;
  const absl::Time began_ = SteadyNow();
  rpc::CallContext context_;
  rpc::Span span_;
  ops::RpcTimer timer_;
  rpc::Admission::Grant grant_;
  std::vector<rpc::CallContext::Room> rooms_;  // of the thread that works on it
};

}  // namespace emberd::coordinator
