#include "server/coordinator/pooled_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/ops/logging.h"
#include "server/rpc/status_codes.h"
#include "server/rpc/trace.h"

namespace emberd::server {

absl::Status InFlightBytes::Acquire(int64_t bytes) {
  const int64_t before = bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (before + bytes <= limit_) return absl::OkStatus();
  Release(bytes);
  return absl::ResourceExhaustedError(absl::StrCat("a request of ", bytes, " bytes beside the ",
                                                   before, " in work; budgets.in_flight_bytes is ",
                                                   limit_));
}

absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline) {
  const std::chrono::system_clock::time_point deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max())
    return absl::Now() + default_deadline;
  return absl::FromChrono(deadline);
}

PooledCall::PooledCall(const CallEnvironment& environment,
                       const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                       int64_t request_bytes)
    : environment_(environment),
      rpc_(rpc),
      request_bytes_(request_bytes),
      context_(DeadlineOf(server_context, environment.default_deadline),
               rpc::TraceOf(server_context)),
      timer_(environment.metrics, rpc, request_bytes) {}

grpc::ServerUnaryReactor* PooledCall::Start(const CallEnvironment& environment,
                                            const grpc::CallbackServerContext& server_context,
                                            ops::Rpc rpc, int64_t request_bytes, Work work) {
  auto* call = new PooledCall(environment, server_context, rpc, request_bytes);
  absl::Status status = environment.in_flight->Acquire(request_bytes);
  if (!status.ok()) {
    call->timer_.Finish(status.code());
    call->Finish(rpc::ToGrpcStatus(status));
    return call;
  }
  if (!environment.pool->Submit([call, work = std::move(work)] { call->Run(work); })) {
    call->End(absl::ResourceExhaustedError(absl::StrCat(
        environment.pool->max_queued(), " requests are waiting already; retry later")));
  }
  return call;
}

void PooledCall::Run(const Work& work) {
  if (context_.cancelled()) {
    End(absl::CancelledError("the caller gave up while the request was waiting"));
    return;
  }
  int64_t response_bytes = 0;
  const absl::Status status = work(&context_, &response_bytes);
  timer_.AddResponseBytes(response_bytes);
  End(status);
}

void PooledCall::End(const absl::Status& status) {
  const absl::Duration took = absl::Now() - began_;
  if (took > environment_.slow_call) {
    ops::Log(ops::LogLevel::kWarning, "slow call",
             {{"rpc", ops::RpcName(rpc_)},
              {"code", ops::CodeName(status.code())},
              {"ms", absl::ToInt64Milliseconds(took)},
              {"trace", rpc::TraceId(context_.trace())}});
  }
  environment_.in_flight->Release(request_bytes_);
  timer_.Finish(status.code());
  Finish(rpc::ToGrpcStatus(status));
}

}  // namespace emberd::server
