// One unary call whose work blocks: it runs on a WorkerPool, under budgets, with the caller's
// deadline and cancellation.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/worker_pool.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// Bytes of the requests that a process works on, against budgets.in_flight_bytes. Thread-safe.
class InFlightBytes {
 public:
  explicit InFlightBytes(int64_t limit) : limit_(limit) {}
  // RESOURCE_EXHAUSTED with the figures if the budget does not allow it; otherwise give it back
  // with Release.
  absl::Status Acquire(int64_t bytes);
  void Release(int64_t bytes) { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  const int64_t limit_;
  std::atomic<int64_t> bytes_ = 0;
};

// What the calls of one service share.
struct CallEnvironment {
  WorkerPool* pool = nullptr;
  InFlightBytes* in_flight = nullptr;
  ops::ServerMetrics* metrics = nullptr;
  absl::Duration default_deadline;  // for callers that send none
  absl::Duration slow_call;         // calls that take longer are logged
};

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

  void Run(const Work& work);
  void End(const absl::Status& status);
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  const ops::Rpc rpc_;
  const int64_t request_bytes_;
  const absl::Time began_ = absl::Now();
  rpc::CallContext context_;
  ops::RpcTimer timer_;
};

}  // namespace emberd::server
