#include "server/shard/shard_service.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message_stream.h"
#include "server/rpc/wire.h"
#include "server/shard/hot_rows_rule.h"
#include "server/shard/shard_codec.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

// Logs a call of a step that took long, with the trace that its coordinator sent.
class SlowCallLog {
 public:
  SlowCallLog(const ShardHost& host, ops::Rpc rpc, const grpc::ServerContextBase& context)
      : slow_(host.slow_call()), rpc_(rpc), trace_(rpc::TraceOf(context)) {}

  // Times one piece of the shard's own work.
  void Begin() { began_ = absl::Now(); }
  void End() const {
    const absl::Duration took = absl::Now() - began_;
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
  absl::Time began_ = absl::Now();
};

// One Gather: a command comes, partial sums go.
class GatherStream final : public rpc::ServerMessageStream {
 public:
  GatherStream(ShardHost* host, const grpc::ServerContextBase& context, int64_t max_message_bytes)
      : ServerMessageStream(max_message_bytes),
        host_(host),
        slow_log_(*host, ops::Rpc::kShardGather, context),
        timer_(host->metrics(), ops::Rpc::kShardGather) {
    Begin();
  }

 private:
  void OnMessage(rpc::IncomingMessage message) override {
    timer_.AddRequestBytes(static_cast<int64_t>(message.payload().size()));
    slow_log_.Begin();
    absl::StatusOr<GatherCommand> command = DecodeGather(message, host_->sparsecores_per_shard());
    if (!command.ok()) {
      End(command.status());
      return;
    }
    host_->Gather(*std::move(command),
                  [this, model_id = command->model_id,
                   handle = command->batch_handle](absl::StatusOr<GatherResult> result) {
                    // Nobody will use, or release, the batch of a caller that is gone.
                    if (result.ok() && handle != 0 && peer_cancelled()) {
                      host_->ReleaseBatch(model_id, handle).IgnoreError();
                    }
                    slow_log_.End();
                    Answer(std::move(result));
                  });
  }

  void Answer(absl::StatusOr<GatherResult> result) {
    if (!result.ok()) {
      End(result.status());
      return;
    }
    rpc::OutgoingMessage reply = EncodeGatherResult(*result);
    for (const rpc::SharedBytes& piece : reply.payload) {
      timer_.AddResponseBytes(static_cast<int64_t>(piece.bytes.size()));
    }
    timer_.Finish(absl::StatusCode::kOk);
    SendLast(std::move(reply));
  }

  void End(const absl::Status& status) {
    timer_.Finish(status.code());
    Close(status);
  }

  ShardHost* const host_;
  SlowCallLog slow_log_;
  ops::RpcTimer timer_;
};

// One Apply: gradients come, STAGED goes, the decision comes, the outcome goes.
class ApplyStream final : public rpc::ServerMessageStream {
 public:
  ApplyStream(ShardHost* host, const grpc::ServerContextBase& context, int64_t max_message_bytes)
      : ServerMessageStream(max_message_bytes),
        host_(host),
        slow_log_(*host, ops::Rpc::kShardApply, context),
        timer_(host->metrics(), ops::Rpc::kShardApply) {
    Begin();
  }

 private:
  void OnMessage(rpc::IncomingMessage message) override {
    if (staged_.has_value()) {
      Decide(message);
    } else {
      timer_.AddRequestBytes(static_cast<int64_t>(message.payload().size()));
      Stage(message);
    }
  }

  void Stage(const rpc::IncomingMessage& message) {
    slow_log_.Begin();
    absl::StatusOr<ApplyCommand> command = DecodeApply(message);
    if (!command.ok()) {
      End(command.status());
      return;
    }
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
      Discard();
      End(absl::InvalidArgumentError("malformed message: its header is no ApplyDecision"));
    } else if (!decision.commit()) {
      Discard();
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

  void OnPeerGone() override {
    Discard();
    End(absl::CancelledError("the coordinator went away before its decision"));
  }

  void Discard() {
    if (staged_.has_value()) host_->Discard(*std::exchange(staged_, std::nullopt));
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
  SlowCallLog slow_log_;
  ops::RpcTimer timer_;
  std::optional<ShardHost::StagedApply> staged_;
};

template <typename T>
absl::StatusOr<std::vector<T>> Unpack(const std::string& bytes, absl::string_view what) {
  if (bytes.size() % sizeof(T) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", bytes.size(), " bytes, not a multiple of ", sizeof(T)));
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// One ReadRows or AssignRows: owns what the engine works on.
struct RowsCall {
  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<float> values;
  shard::RowSelection selection;

  template <typename Request>
  absl::Status Read(const Request& request) {
    auto unpacked_partitions = Unpack<int32_t>(request.partitions(), "partitions");
    if (!unpacked_partitions.ok()) return unpacked_partitions.status();
    auto unpacked_rows = Unpack<int64_t>(request.local_rows(), "local_rows");
    if (!unpacked_rows.ok()) return unpacked_rows.status();
    partitions = *std::move(unpacked_partitions);
    local_rows = *std::move(unpacked_rows);
    if (partitions.size() != local_rows.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(partitions.size(), " partitions for ", local_rows.size(), " rows"));
    }
    if (request.columns() < 1 || request.columns() > 8192) {
      return absl::InvalidArgumentError(
          absl::StrCat("columns is ", request.columns(), "; it must be in 1 .. 8192"));
    }
    selection = {request.model_id(), request.stack(), request.slot(),
                 partitions,         local_rows,      request.columns()};
    return absl::OkStatus();
  }
};

using ServiceBase = pb::ShardService::WithCallbackMethod_CreateModel<
    pb::ShardService::WithCallbackMethod_FindModel<pb::ShardService::WithCallbackMethod_DropModel<
        pb::ShardService::WithRawCallbackMethod_Gather<
            pb::ShardService::WithRawCallbackMethod_Apply<
                pb::ShardService::WithCallbackMethod_OpenGroup<
                    pb::ShardService::WithCallbackMethod_DecideStep<
                        pb::ShardService::WithCallbackMethod_ReleaseBatch<
                            pb::ShardService::WithCallbackMethod_ReadRows<
                                pb::ShardService::WithCallbackMethod_AssignRows<
                                    pb::ShardService::WithCallbackMethod_GetStatus<
                                        pb::ShardService::Service>>>>>>>>>>>;

class ShardServiceImpl final : public ServiceBase {
 public:
  ShardServiceImpl(ShardHost* host, int64_t max_message_bytes)
      : host_(host), max_message_bytes_(max_message_bytes), slow_calls_(1, 64) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Gather(
      grpc::CallbackServerContext* context) override {
    return new GatherStream(host_, *context, max_message_bytes_);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Apply(
      grpc::CallbackServerContext* context) override {
    return new ApplyStream(host_, *context, max_message_bytes_);
  }

  // Filling tables takes a while: not on a gRPC thread.
  grpc::ServerUnaryReactor* CreateModel(grpc::CallbackServerContext* context,
                                        const pb::CreateModelRequest* request,
                                        pb::CreateModelResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const bool queued = slow_calls_.Submit([this, request, response, reactor] {
      ops::RpcTimer timer(host_->metrics(), ops::Rpc::kShardCreateModel);
      Answer(reactor, host_->CreateModel(*request), response, &timer);
    });
    if (!queued)
      reactor->Finish(
          {grpc::StatusCode::RESOURCE_EXHAUSTED, "64 models are being created already"});
    return reactor;
  }

  grpc::ServerUnaryReactor* FindModel(grpc::CallbackServerContext* context,
                                      const pb::FindModelRequest* request,
                                      pb::FindModelResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    Answer(reactor, host_->FindModel(*request), response, nullptr);
    return reactor;
  }

  grpc::ServerUnaryReactor* DropModel(grpc::CallbackServerContext* context,
                                      const pb::DropModelRequest* request,
                                      pb::DropModelResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(rpc::ToGrpcStatus(host_->DropModel(request->model_id())));
    return reactor;
  }

  grpc::ServerUnaryReactor* OpenGroup(grpc::CallbackServerContext* context,
                                      const pb::OpenGroupRequest* request,
                                      pb::OpenGroupResponse* response) override {
    ops::RpcTimer timer(host_->metrics(), ops::Rpc::kShardOpenGroup);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    Answer(reactor, host_->OpenGroup(*request), response, &timer);
    return reactor;
  }

  grpc::ServerUnaryReactor* DecideStep(grpc::CallbackServerContext* context,
                                       const pb::DecideStepRequest* request,
                                       pb::DecideStepResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto timer = std::make_shared<ops::RpcTimer>(host_->metrics(), ops::Rpc::kShardDecideStep);
    host_->DecideStep(*request, [timer, response, reactor](absl::StatusOr<RowCounts> rows) {
      if (rows.ok()) SetRowCounts(*rows, response);
      timer->Finish(rows.status().code());
      reactor->Finish(rpc::ToGrpcStatus(rows.status()));
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ReleaseBatch(grpc::CallbackServerContext* context,
                                         const pb::ReleaseBatchRequest* request,
                                         pb::ReleaseBatchResponse*) override {
    ops::RpcTimer timer(host_->metrics(), ops::Rpc::kShardReleaseBatch);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Status status = host_->ReleaseBatch(request->model_id(), request->batch_handle());
    timer.Finish(status.code());
    reactor->Finish(rpc::ToGrpcStatus(status));
    return reactor;
  }

  grpc::ServerUnaryReactor* ReadRows(grpc::CallbackServerContext* context,
                                     const pb::ReadShardRowsRequest* request,
                                     pb::ReadShardRowsResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto timer = std::make_shared<ops::RpcTimer>(host_->metrics(), ops::Rpc::kShardReadRows);
    auto call = std::make_shared<RowsCall>();
    absl::Status status = call->Read(*request);
    const uint64_t bytes = call->partitions.size() * uint64_t{sizeof(float)} *
                           static_cast<uint64_t>(request->columns());
    if (status.ok() && bytes > static_cast<uint64_t>(max_message_bytes_)) {
      status = absl::ResourceExhaustedError(absl::StrCat("the rows asked for have ", bytes,
                                                         " bytes; budgets.max_message_bytes is ",
                                                         max_message_bytes_));
    }
    if (!status.ok()) {
      timer->Finish(status.code());
      reactor->Finish(rpc::ToGrpcStatus(status));
      return reactor;
    }
    call->values.resize(call->partitions.size() * call->selection.columns);
    host_->ReadRows(call->selection, absl::MakeSpan(call->values),
                    [call, timer, response, reactor](absl::Status read) {
                      if (read.ok()) {
                        response->set_values(call->values.data(),
                                             call->values.size() * sizeof(float));
                      }
                      timer->AddResponseBytes(static_cast<int64_t>(response->values().size()));
                      timer->Finish(read.code());
                      reactor->Finish(rpc::ToGrpcStatus(read));
                    });
    return reactor;
  }

  grpc::ServerUnaryReactor* AssignRows(grpc::CallbackServerContext* context,
                                       const pb::AssignShardRowsRequest* request,
                                       pb::AssignShardRowsResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto timer = std::make_shared<ops::RpcTimer>(host_->metrics(), ops::Rpc::kShardAssignRows,
                                                 static_cast<int64_t>(request->values().size()));
    auto call = std::make_shared<RowsCall>();
    const Mutation mutation{request->client_id(), request->sequence(), request->tag()};
    absl::Status status = call->Read(*request);
    if (status.ok()) status = CheckMutation(mutation);
    auto values = Unpack<float>(request->values(), "values");
    if (status.ok()) status = values.status();
    if (status.ok() && values->size() != call->partitions.size() * call->selection.columns) {
      status = absl::InvalidArgumentError(absl::StrCat(values->size(), " values for ",
                                                       call->partitions.size(), " rows of ",
                                                       call->selection.columns, " columns"));
    }
    if (!status.ok()) {
      timer->Finish(status.code());
      reactor->Finish(rpc::ToGrpcStatus(status));
      return reactor;
    }
    call->values = *std::move(values);
    host_->AssignRows(call->selection, call->values, mutation,
                      [call, timer, response, reactor](absl::StatusOr<bool> replayed) {
                        if (replayed.ok()) response->set_replayed(*replayed);
                        timer->Finish(replayed.status().code());
                        reactor->Finish(rpc::ToGrpcStatus(replayed.status()));
                      });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const pb::GetShardStatusRequest* request,
                                      v1::ShardStatus* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const bool queued = status_calls_.Submit([this, request, response, reactor] {
      ops::RpcTimer timer(host_->metrics(), ops::Rpc::kShardGetStatus);
      const absl::Status status = CheckHotRows(request->hot_rows());
      if (status.ok()) *response = host_->GetStatus(request->hot_rows());
      timer.Finish(status.code());
      reactor->Finish(rpc::ToGrpcStatus(status));
    });
    if (!queued) {
      reactor->Finish({grpc::StatusCode::RESOURCE_EXHAUSTED,
                       absl::StrCat(status_calls_.max_queued(), " calls of it wait already")});
    }
    return reactor;
  }

 private:
  template <typename Response>
  static void Answer(grpc::ServerUnaryReactor* reactor, absl::StatusOr<Response> result,
                     Response* response, ops::RpcTimer* timer) {
    if (timer != nullptr) timer->Finish(result.status().code());
    if (result.ok()) *response = *std::move(result);
    reactor->Finish(rpc::ToGrpcStatus(result.status()));
  }

  ShardHost* const host_;
  const int64_t max_message_bytes_;
  BlockingPool slow_calls_;
  // Apart from the slow ones: who asks for the status waits for a second only.
  BlockingPool status_calls_{1, 64};
};

}  // namespace

std::unique_ptr<grpc::Service> MakeShardService(ShardHost* host, int64_t max_message_bytes) {
  return std::make_unique<ShardServiceImpl>(host, max_message_bytes);
}

}  // namespace emberd::server
