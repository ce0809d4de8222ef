#include "server/host/lane_gather.h"

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/host/promise.h"
#include "server/host/shard_codec.h"
#include "server/ops/metrics.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/spans.h"

namespace emberd::host {
namespace {

// Beside them, a packet has room for the headers.
constexpr int64_t kSmallGatherBytes = int64_t{32} << 10;
constexpr int64_t kSmallSumsBytes = int64_t{40} << 10;

absl::StatusOr<rpc::IncomingMessage> FromOnePart(absl::string_view bytes,
                                                 const rpc::MessageLimits& limits) {
  rpc::MessageAssembler assembler(limits);
  ASSIGN_OR_RETURN(auto message, assembler.Add(bytes));
  if (message.has_value()) return *std::move(message);
  return absl::InvalidArgumentError("malformed message: it has more than one part");
}

// One call, on the thread of its lane.
class ServedGather {
 public:
  ServedGather(ShardHost* host, LaneCall* call)
      : host_(host),
        call_(call),
        work_(host->slow_call(), ops::Rpc::kShardGather, rpc::TraceOf(call->request().trace)),
        timer_(host->metrics(), ops::Rpc::kShardGather) {
    host->metrics()->Add(ops::MetricId::kLaneCalls);
    call->OnCancel([this] { cancelled_.store(true); });
  }
  ~ServedGather() { call_->OnCancel(nullptr); }

  LaneAnswer Run() {
    LaneAnswer answer;
    answer.status = Gather(&answer);
    work_.End();
    timer_.Finish(answer.status.code());
    return answer;
  }

 private:
  absl::Status Gather(LaneAnswer* answer) {
    ASSIGN_OR_RETURN(const rpc::IncomingMessage message,
                     FromOnePart(call_->request().body, host_->limits()));
    ASSIGN_OR_RETURN(GatherCommand command, DecodeGather(message, host_->sparsecores_per_shard()));
    timer_.AddRequestBytes(PayloadBytes(command));
    const uint64_t model_id = command.model_id;
    const uint64_t handle = command.batch_handle;
    ASSIGN_OR_RETURN(const GatherResult result,
                     WaitForAnswer<absl::StatusOr<GatherResult>>(
                         [&](auto done) { host_->Gather(std::move(command), done); }));
    const rpc::OutgoingMessage reply = EncodeGatherResult(result);
    const int64_t bytes = reply.payload_bytes() + static_cast<int64_t>(reply.header.size());
    answer->elsewhere = bytes > kMaxBody;
    // Nobody will use, or release, the batch of a caller that is gone, or asks again.
    if (handle != 0 && (answer->elsewhere || cancelled_.load())) {
      host_->ReleaseBatch(model_id, handle).IgnoreError();
    }
    if (answer->elsewhere) return absl::OkStatus();
    answer->body = rpc::JoinMessage(reply);
    timer_.AddResponseBytes(result.bytes());
    return absl::OkStatus();
  }

  // What fits in a packet beside the few bytes around it.
  static constexpr int64_t kMaxBody = lanes::kMaxPacketBytes - 256 - 64;

  ShardHost* const host_;
  LaneCall* const call_;
  std::atomic<bool> cancelled_ = false;
  rpc::TimedWork work_;
  ops::RpcTimer timer_;
};

// The coordinator's end of a call that was sent on a lane.
class LaneGather final : public GatherCall {
 public:
  LaneGather(const LaneGatherOptions& options, std::unique_ptr<LaneClientCall> call,
             GatherCommand command, rpc::CallContext* context, GrpcGather by_grpc)
      : options_(options),
        call_(std::move(call)),
        command_(std::move(command)),
        context_(context),
        by_grpc_(std::move(by_grpc)) {
    watch_.emplace(context, [call = call_.get()] { call->Cancel(); });
  }

  absl::StatusOr<GatherResult> Wait() override {
    std::optional<absl::StatusOr<GatherResult>> result = Receive();
    if (!result.has_value()) return by_grpc_(std::move(command_))->Wait();
    if (!result->ok()) return options_.explain(result->status());
    return *std::move(result);
  }

 private:
  std::optional<absl::StatusOr<GatherResult>> Receive() {
    // A shard that has been silent may wake up and keep the batch: that must not be asked for twice
    // under one handle.
    const std::optional<lanes::Answer> answer =
        command_.batch_handle == 0 ? call_->Receive(context_->deadline())
                                   : call_->Receive(context_->deadline(), absl::InfiniteDuration());
    watch_.reset();
    std::optional<absl::StatusOr<GatherResult>> result;
    if (answer.has_value()) result = Decode(*answer);
    call_ = nullptr;  // the lane is free for others
    return result;
  }
  absl::StatusOr<GatherResult> Decode(const lanes::Answer& answer) {
    RETURN_IF_ERROR(answer.status);
    ASSIGN_OR_RETURN(const rpc::IncomingMessage message, FromOnePart(answer.body, options_.limits));
    return DecodeGatherResult(message);
  }

  const LaneGatherOptions options_;
  std::unique_ptr<LaneClientCall> call_;
  GatherCommand command_;
  rpc::CallContext* const context_;
  const GrpcGather by_grpc_;
  std::optional<rpc::CancelWatch> watch_;
};

// One that would have been sent on a lane: when it has been answered, the shard can say where one
// is.
class GrowingGather final : public GatherCall {
 public:
  GrowingGather(LanePool* lanes, std::unique_ptr<GatherCall> call, absl::Time deadline)
      : lanes_(lanes), call_(std::move(call)), deadline_(deadline) {}

  absl::StatusOr<GatherResult> Wait() override {
    absl::StatusOr<GatherResult> result = call_->Wait();
    if (result.ok()) lanes_->Grow(deadline_);
    return result;
  }

 private:
  LanePool* const lanes_;
  const std::unique_ptr<GatherCall> call_;
  const absl::Time deadline_;
};

// What names places in shared memory is not: the other way says what to do with them.
bool IsSmall(const GatherCommand& command) {
  return command.places.stacks.empty() && command.answer_bytes > 0 &&
         command.answer_bytes <= kSmallSumsBytes && PayloadBytes(command) <= kSmallGatherBytes;
}

}  // namespace

LaneServer::Handler MakeGatherHandler(ShardHost* host, const security::Security* security) {
  // Who was given a ticket has shown that it means this shard; neither of the two can change.
  return rpc::ServeOnLanes(v1::GATHER, "/emberd.internal.v1.ShardService/Gather", security,
                           [host](LaneCall* call) -> LaneAnswer {
                             absl::Status ready = host->CheckReady();
                             if (!ready.ok()) return {.status = std::move(ready)};
                             return ServedGather(host, call).Run();
                           });
}

std::unique_ptr<GatherCall> MakeLaneGather(const LaneGatherOptions& options, GatherCommand command,
                                           rpc::CallContext* context, GrpcGather by_grpc) {
  if (options.lanes == nullptr || !IsSmall(command)) return by_grpc(std::move(command));
  const std::string trace = context->trace();
  const std::string body = rpc::JoinMessage(EncodeGather(command));
  std::unique_ptr<LaneClientCall> call =
      options.lanes->Send({.method = v1::GATHER,
                           .patience = context->deadline() - SteadyNow(),
                           .authorization = options.authorization,
                           .trace = trace,
                           .body = body});
  if (call == nullptr) {
    return std::make_unique<GrowingGather>(options.lanes, by_grpc(std::move(command)),
                                           context->deadline());
  }
  return std::make_unique<LaneGather>(options, std::move(call), std::move(command), context,
                                      std::move(by_grpc));
}

}  // namespace emberd::host
