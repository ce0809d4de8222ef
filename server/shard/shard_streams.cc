#include "server/shard/shard_streams.h"

#include <optional>
#include <string>
#include <utility>

#include "base/failpoint.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message_stream.h"
#include "server/rpc/wire.h"
#include "server/shard/apply_codec.h"
#include "server/shard/gather_codec.h"
#include "server/shard/slow_call_log.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

// One Gather: a command comes, partial sums go.
class GatherStream final : public rpc::ServerMessageStream {
 public:
  GatherStream(ShardHost* host, const grpc::ServerContextBase& context,
               const rpc::MessageLimits& limits, const RegionServer* regions)
      : ServerMessageStream(limits),
        host_(host),
        limits_(limits),
        regions_(regions),
        slow_log_(*host, ops::Rpc::kShardGather, rpc::TraceOf(context)),
        timer_(host->metrics(), ops::Rpc::kShardGather) {
    Begin();
  }

 private:
  void OnMessage(rpc::IncomingMessage message) override {
    slow_log_.Begin();
    absl::StatusOr<GatherCommand> command =
        DecodeGather(message, host_->sparsecores_per_shard(), regions_, limits_);
    if (!command.ok()) return End(command.status());
    timer_.AddRequestBytes(PayloadBytes(*command));
    absl::StatusOr<AnswerRoom> room = FindAnswerRoom(regions_, command->answer);
    if (!room.ok()) return End(room.status());
    room_ = *std::move(room);
    command->places.room = absl::MakeSpan(room_.memory.get(), room_.size);
    const uint64_t model_id = command->model_id;
    const uint64_t handle = command->batch_handle;
    host_->Gather(*std::move(command),
                  [this, model_id, handle](absl::StatusOr<GatherResult> result) {
                    // Nobody will use, or release, the batch of a caller that is gone.
                    if (result.ok() && handle != 0 && peer_cancelled()) {
                      host_->ReleaseBatch(model_id, handle).IgnoreError();
                    }
                    slow_log_.End();
                    Answer(std::move(result));
                  });
  }

  void Answer(absl::StatusOr<GatherResult> result) {
    if (!result.ok()) return End(result.status());
    for (const StackSumsView& stack : result->stacks) timer_.AddResponseBytes(PayloadBytes(stack));
    for (const StackRowsView& stack : result->rows) {
      timer_.AddResponseBytes(static_cast<int64_t>(stack.rows.size()));
    }
    rpc::OutgoingMessage reply = EncodeGatherResult(*result, std::exchange(room_, {}));
    timer_.Finish(absl::StatusCode::kOk);
    SendLast(std::move(reply));
  }

  void End(const absl::Status& status) {
    timer_.Finish(status.code());
    Close(status);
  }

  ShardHost* const host_;
  const rpc::MessageLimits limits_;
  const RegionServer* const regions_;
  SlowCallLog slow_log_;
  ops::RpcTimer timer_;
  AnswerRoom room_;
};

// One Apply: gradients come, STAGED goes, the decision comes, the outcome goes.
class ApplyStream final : public rpc::ServerMessageStream {
 public:
  ApplyStream(ShardHost* host, const grpc::ServerContextBase& context,
              const rpc::MessageLimits& limits, const RegionServer* regions)
      : ServerMessageStream(limits),
        host_(host),
        limits_(limits),
        regions_(regions),
        slow_log_(*host, ops::Rpc::kShardApply, rpc::TraceOf(context)),
        timer_(host->metrics(), ops::Rpc::kShardApply) {
    Begin();
  }

 private:
  void OnMessage(rpc::IncomingMessage message) override {
    if (staged_.has_value()) {
      Decide(message);
    } else {
      Stage(message);
    }
  }

  void Stage(const rpc::IncomingMessage& message) {
    slow_log_.Begin();
    absl::StatusOr<ApplyCommand> command = DecodeApply(message, regions_);
    if (!command.ok()) return End(command.status());
    timer_.AddRequestBytes(command->payload_bytes);
    host_->Stage(*std::move(command), [this](absl::StatusOr<ShardHost::StagedApply> staged) {
      slow_log_.End();
      if (!staged.ok()) {
        End(staged.status());
      } else if (staged->outcome().replayed) {
        Conclude(pb::ApplyReply::REPLAYED, staged->outcome().rows);
      } else {
        staged_ = *std::move(staged);
        Send(Reply(pb::ApplyReply::STAGED, {}));
      }
    });
  }

  void Decide(const rpc::IncomingMessage& message) {
    pb::ApplyDecision decision;
    if (!decision.ParseFromString(message.header())) {
      End(absl::InvalidArgumentError("malformed message: its header is not a valid ApplyDecision"));
    } else if (!decision.commit()) {
      host_->Discard(*std::exchange(staged_, std::nullopt));
      Conclude(pb::ApplyReply::DISCARDED, {});
    } else {
      slow_log_.Begin();
      host_->Commit(*std::exchange(staged_, std::nullopt), [this](absl::StatusOr<RowCounts> rows) {
        slow_log_.End();
        if (rows.ok()) {
          Conclude(pb::ApplyReply::COMMITTED, *rows);
        } else {
          End(rows.status());
        }
      });
    }
  }

  // What is staged stays: whoever gets the retry decides.
  void OnPeerGone() override {
    if (staged_.has_value() && Mistake("vote.goes_with_stream")) host_->Discard(*staged_);
    End(absl::CancelledError("the coordinator went away before its decision"));
  }

  static rpc::OutgoingMessage Reply(pb::ApplyReply::State state, const RowCounts& rows) {
    pb::ApplyReply reply;
    reply.set_state(state);
    SetRowCounts(rows, &reply);
    return rpc::OutgoingMessage::WithHeader(reply);
  }
  void Conclude(pb::ApplyReply::State state, const RowCounts& rows) {
    timer_.Finish(absl::StatusCode::kOk);
    SendLast(Reply(state, rows));
  }
  void End(const absl::Status& status) {
    timer_.Finish(status.code());
    Close(status);
  }

  ShardHost* const host_;
  const rpc::MessageLimits limits_;
  const RegionServer* const regions_;
  SlowCallLog slow_log_;
  ops::RpcTimer timer_;
  std::optional<ShardHost::StagedApply> staged_;
};

class RefusedStream final : public MessageReactor {
 public:
  explicit RefusedStream(const absl::Status& status) { Finish(rpc::ToGrpcStatus(status)); }

 private:
  void OnDone() override { delete this; }
};

}  // namespace

MessageReactor* NewRefusedStream(const absl::Status& status) { return new RefusedStream(status); }

MessageReactor* NewGatherStream(ShardHost* host, const grpc::ServerContextBase& context,
                                const rpc::MessageLimits& limits, const RegionServer* regions) {
  return new GatherStream(host, context, limits, regions);
}

MessageReactor* NewApplyStream(ShardHost* host, const grpc::ServerContextBase& context,
                               const rpc::MessageLimits& limits, const RegionServer* regions) {
  return new ApplyStream(host, context, limits, regions);
}

}  // namespace emberd::server
