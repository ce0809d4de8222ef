// Calls of a step that take a shard long.
#pragma once

#include <string>
#include <utility>

#include "absl/time/time.h"
#include "base/steady_time.h"
#include "server/host/shard_host.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"
#include "server/rpc/spans.h"

namespace emberd::host {

// Logs a call of a step that took long, with the trace that its coordinator sent.
class SlowCallLog {
 public:
  SlowCallLog(const ShardHost& host, ops::Rpc rpc, std::string trace)
      : slow_(host.slow_call()), rpc_(rpc), trace_(std::move(trace)) {}

  // Times one piece of the shard's own work.
  void Begin() { began_ = SteadyNow(); }
  void End() const {
    rpc::WriteSpan(ops::RpcName(rpc_), trace_, began_);
    const absl::Duration took = SteadyNow() - began_;
    if (took <= slow_) return;
    ops::Log(ops::LogLevel::kWarning, "slow call",
             {{"rpc", ops::RpcName(rpc_)},
              {"ms", absl::ToInt64Milliseconds(took)},
              {"trace", rpc::TraceId(trace_)}});
  }

 private:
  const absl::Duration slow_;
  const ops::Rpc rpc_;
  const std::string trace_;
  absl::Time began_ = SteadyNow();
};

}  // namespace emberd::host
