#include "server/host/shard_server.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/failpoint.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "server/host/shard_codec.h"
#include "server/host/verbs.h"
#include "server/ops/logging.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message.h"
#include "server/rpc/message_stream.h"

namespace emberd::host {
namespace {

namespace pb = internal::v1;

constexpr int kMaxQueuedCalls = 64;

using google::protobuf::Message;
using MessageReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The two calls of a step, Gather and Apply: streams of long messages. Each deletes itself when its
// call is over.

class StepStream : public rpc::ServerMessageStream {
 public:
  StepStream(ShardHost* host, const grpc::ServerContextBase& context, const RegionServer* regions,
             ops::Rpc rpc)
      : ServerMessageStream(host->limits()),
        host_(host),
        regions_(regions),
        work_(host->slow_call(), rpc, rpc::TraceOf(context)),
        timer_(host->metrics(), rpc) {}

 protected:
  void End(const absl::Status& status) {
    timer_.Finish(status.code());
    Close(status);
  }
  void EndWith(rpc::OutgoingMessage reply) {
    timer_.Finish(absl::StatusCode::kOk);
    SendLast(std::move(reply));
  }

  ShardHost* const host_;
  const RegionServer* const regions_;
  rpc::TimedWork work_;
  ops::RpcTimer timer_;
};

// One Gather: a command comes, partial sums go.
class GatherStream final : public StepStream {
 public:
  GatherStream(ShardHost* host, const grpc::ServerContextBase& context, const RegionServer* regions)
      : StepStream(host, context, regions, ops::Rpc::kShardGather) {
    Begin();
  }

 private:
  void OnMessage(rpc::IncomingMessage message) override {
    work_.Begin();
    absl::StatusOr<GatherCommand> command =
        DecodeGather(message, host_->sparsecores_per_shard(), regions_, host_->limits());
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
                    work_.End();
                    Answer(std::move(result));
                  });
  }

  void Answer(absl::StatusOr<GatherResult> result) {
    if (!result.ok()) return End(result.status());
    timer_.AddResponseBytes(result->bytes());
    EndWith(EncodeGatherResult(*result, std::exchange(room_, {})));
  }

  AnswerRoom room_;
};

// One Apply: gradients come, STAGED goes, the decision comes, the outcome goes.
class ApplyStream final : public StepStream {
 public:
  ApplyStream(ShardHost* host, const grpc::ServerContextBase& context, const RegionServer* regions)
      : StepStream(host, context, regions, ops::Rpc::kShardApply) {
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
    work_.Begin();
    absl::StatusOr<ApplyCommand> command = DecodeApply(message, regions_);
    if (!command.ok()) return End(command.status());
    timer_.AddRequestBytes(command->payload_bytes);
    host_->Stage(*std::move(command), [this](absl::StatusOr<ShardHost::StagedApply> staged) {
      work_.End();
      if (!staged.ok()) {
        End(staged.status());
      } else if (staged->outcome.replayed) {
        EndWith(Reply(pb::ApplyReply::REPLAYED, staged->outcome.rows));
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
      EndWith(Reply(pb::ApplyReply::DISCARDED, {}));
    } else {
      work_.Begin();
      host_->Commit(*std::exchange(staged_, std::nullopt), [this](absl::StatusOr<RowCounts> rows) {
        work_.End();
        if (rows.ok()) {
          EndWith(Reply(pb::ApplyReply::COMMITTED, *rows));
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

  std::optional<ShardHost::StagedApply> staged_;
};

// One Gather without gRPC, where the coordinator is on this machine: on the thread of its lane. See
// server/rpc/local_peers.h.
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
                     rpc::ReadJoined(call_->request().body, host_->limits()));
    ASSIGN_OR_RETURN(GatherCommand command, DecodeGather(message, host_->sparsecores_per_shard()));
    timer_.AddRequestBytes(PayloadBytes(command));
    const uint64_t model_id = command.model_id;
    const uint64_t handle = command.batch_handle;
    ASSIGN_OR_RETURN(const GatherResult result,
                     rpc::WaitForAnswer<absl::StatusOr<GatherResult>>(
                         [&](auto done) { host_->Gather(std::move(command), done); }));
    const rpc::OutgoingMessage reply = EncodeGatherResult(result);
    const int64_t bytes = reply.payload_bytes() + static_cast<int64_t>(reply.header.size());
    answer->elsewhere = bytes > kMaxBody;
    // Nobody will use, or release, the batch of a caller that is gone, or asks again.
    const bool gone = cancelled_.load();
    if (handle != 0 && (answer->elsewhere || gone)) {
      host_->ReleaseBatch(model_id, handle).IgnoreError();
    }
    // Only heard where calls are cut short by the end of this process.
    if (handle != 0 && gone) return absl::UnavailableError("the shard is stopping; retry later");
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

// Both must outlive the LaneServer; `security` may be null.
LaneServer::Handler MakeGatherHandler(ShardHost* host, const security::Security* security) {
  // Who was given a ticket has shown that it means this shard; neither of the two can change.
  return rpc::ServeOnLanes(v1::GATHER, "/emberd.internal.v1.ShardService/Gather", security,
                           [host](LaneCall* call) -> LaneAnswer {
                             absl::Status ready = host->CheckReady();
                             if (!ready.ok()) return {.status = std::move(ready)};
                             return ServedGather(host, call).Run();
                           });
}

class RefusedStream final : public MessageReactor {
 public:
  explicit RefusedStream(const absl::Status& status) { Finish(rpc::ToGrpcStatus(status)); }

 private:
  void OnDone() override { delete this; }
};

// A call with a single answer. Deletes itself when it is over; until then, the messages stay.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryCall(const Message* response) : response_(response) {}

  void CountAs(ShardHost* host, ops::Rpc rpc, const Message& request) {
    timer_.emplace(host->metrics(), rpc, static_cast<int64_t>(request.ByteSizeLong()));
  }
  // What to do when the caller goes away. Set before gRPC has the call, which tells only then.
  void OnCallerGone(ShardVerbs::Withdraw withdraw) {
    absl::MutexLock lock(&mutex_);
    withdraw_ = std::move(withdraw);
  }

  void End(const absl::Status& status) {
    if (timer_.has_value()) {
      if (status.ok()) timer_->AddResponseBytes(static_cast<int64_t>(response_->ByteSizeLong()));
      timer_->Finish(status.code());
    }
    Finish(rpc::ToGrpcStatus(status));
  }

 private:
  void OnCancel() override {
    ShardVerbs::Withdraw withdraw;
    {
      absl::MutexLock lock(&mutex_);
      withdraw = withdraw_;
    }
    if (withdraw != nullptr) withdraw(absl::CancelledError("the caller went away"));
  }
  void OnDone() override { delete this; }

  const Message* const response_;
  std::optional<ops::RpcTimer> timer_;
  absl::Mutex mutex_;  // gRPC's own, which orders the two, is not seen by ThreadSanitizer
  ShardVerbs::Withdraw withdraw_ ABSL_GUARDED_BY(mutex_);
};

using Service = pb::ShardService;
// Streams of the hot path as bytes, all others as messages.
#define EMBERD_WITH(name, request, response, runs) Service::WithCallbackMethod_##name <
#define EMBERD_CLOSE(name, request, response, runs) >
using Control = EMBERD_SHARD_VERBS(EMBERD_WITH) Service::Service EMBERD_SHARD_VERBS(EMBERD_CLOSE);
#undef EMBERD_WITH
#undef EMBERD_CLOSE
using ShardServiceBase = Service::WithRawCallbackMethod_Gather<
    Service::WithRawCallbackMethod_Apply<Service::WithCallbackMethod_ShareMemory<Control>>>;

// Decodes, hands on to the host, encodes. Blocks no gRPC thread for long.
class ShardServiceImpl final : public ShardServiceBase {
 public:
  ShardServiceImpl(ShardHost* host, group::Rendezvous* rendezvous,
                   const rpc::ShardPlaceCheck* place, RegionServer* regions, LocalServer* local,
                   BlockingPool* threads)
      : host_(host),
        verbs_(host, rendezvous),
        place_(place),
        regions_(regions),
        local_(local),
        slow_calls_(threads, 1, kMaxQueuedCalls),
        file_calls_(threads, 4, kMaxQueuedCalls),
        status_calls_(threads, 1, kMaxQueuedCalls) {}

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  MessageReactor* Gather(Context* context) override {
    const absl::Status status = Check(*context);
    if (!status.ok()) return new RefusedStream(status);
    return new GatherStream(host_, *context, regions_);
  }
  MessageReactor* Apply(Context* context) override {
    const absl::Status status = Check(*context);
    if (!status.ok()) return new RefusedStream(status);
    return new ApplyStream(host_, *context, regions_);
  }

#define EMBERD_VERB(name, request_type, response_type, runs)                                       \
  Reactor* name(Context* context, const request_type* request, response_type* response) override { \
    return Run(ShardVerb::k##name, context, *request, response);                                   \
  }
  EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB

  Reactor* ShareMemory(Context* context, const v1::ShareMemoryRequest* request,
                       v1::ShareMemoryResponse* response) override {
    auto* call = new UnaryCall(response);
    absl::Status status = Check(*context);
    if (status.ok()) {
      call->CountAs(host_, ops::Rpc::kShardShareMemory, *request);
      const auto invitation = rpc::InvitePeer(local_, rpc::LocalPeerOf(*context));
      if (invitation.ok()) *response = *invitation;
      status = invitation.status();
    }
    call->End(status);
    return call;
  }

 private:
  absl::Status Check(const Context& context) const {
    RETURN_IF_ERROR(place_->Check(context));
    return host_->CheckReady();
  }

  Reactor* Run(ShardVerb verb, Context* context, const Message& request, Message* response) {
    const VerbRuns runs = RunsOf(verb);
    auto* call = new UnaryCall(response);
    const bool early = runs == VerbRuns::kApart || runs == VerbRuns::kMeets;
    const absl::Status status = early ? place_->Check(*context) : Check(*context);
    if (!status.ok()) {
      call->End(status);
      return call;
    }
    // A watch takes as long as its generation lives.
    if (verb != ShardVerb::kWatch) call->CountAs(host_, ops::ShardRpc(NameOf(verb)), request);
    const auto end = [call](const absl::Status& result) { call->End(result); };
    if (runs == VerbRuns::kAtOnce || runs == VerbRuns::kMeets) {
      call->OnCallerGone(verbs_.Run(verb, request, response, end));
      return call;
    }
    TaskQueue& queue = runs == VerbRuns::kApart     ? status_calls_
                       : runs == VerbRuns::kOfFiles ? file_calls_
                                                    : slow_calls_;
    const auto run = [=, this, request = &request] {
      if (runs == VerbRuns::kIfHeard && context->IsCancelled()) {
        return end(absl::CancelledError("the caller is gone"));
      }
      verbs_.Run(verb, *request, response, end);
    };
    const absl::Status taken = queue.Submit(run, [&queue] {
      return absl::StrCat(queue.max_queued(),
                          " calls that take long wait at this shard already; try again later");
    });
    if (!taken.ok()) end(taken);
    return call;
  }

  ShardHost* const host_;
  ShardVerbs verbs_;
  const rpc::ShardPlaceCheck* const place_;
  RegionServer* const regions_;  // null: no memory is shared
  LocalServer* const local_;     // null: nobody is let in
  TaskQueue slow_calls_;
  TaskQueue file_calls_;
  // Apart from the slow ones: who asks for the status waits for a second only.
  TaskQueue status_calls_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(ShardServerOptions options) {
  if (options.security == nullptr) {
    ASSIGN_OR_RETURN(options.security,
                     security::Security::Create(options.cluster.security(), options.metrics));
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<ShardHost> host,
      ShardHost::Create(options.cluster, options.shard_index, options.metrics, options.threads));
  auto server = std::unique_ptr<ShardServer>(new ShardServer(options, std::move(host)));

  rpc::GrpcServer::Options serving;
  serving.field = absl::StrCat("shards[", options.shard_index, "].address");
  serving.address = options.cluster.shards(options.shard_index).address();
  serving.max_message_bytes = options.cluster.budgets().max_message_bytes();
  serving.receive_bytes = options.cluster.budgets().in_flight_bytes();
  serving.security = options.security;
  serving.services = {server->shard_service_.get()};
  serving.service_names = {"emberd.internal.v1.ShardService"};
  ASSIGN_OR_RETURN(server->server_, rpc::GrpcServer::Start(serving));
  const bool ready = server->CheckReady().ok();
  server->server_->SetServing(ready);
  server->ready_ = std::thread([server = server.get(), ready] {
    server->host_->WaitUntilReady();
    if (!server->CheckReady().ok()) return;
    server->server_->SetServing(true);
    if (!ready) ops::Log(ops::LogLevel::kInfo, "serves now", {{"grpc", server->address()}});
  });
  return server;
}

ShardServer::ShardServer(const ShardServerOptions& options, std::unique_ptr<ShardHost> host)
    : host_(std::move(host)),
      place_(options.cluster, options.shard_index),
      regions_(rpc::MakeRegions(options.cluster, rpc::LocalPeers::kCoordinators)),
      security_(options.security),
      lanes_(MakeGatherHandler(host_.get(), security_.get())),
      local_(rpc::ServeLocally(options.cluster, rpc::LocalPeers::kCoordinators, regions_.get(),
                               &lanes_)),
      shard_service_(std::make_unique<ShardServiceImpl>(host_.get(), &rendezvous_, &place_,
                                                        regions_.get(), local_.get(),
                                                        &options.threads->blocking)) {}

ShardServer::~ShardServer() {
  host_->Cancel();
  if (ready_.joinable()) ready_.join();
}

void ShardServer::Drain(absl::Duration grace) {
  host_->metrics()->Set(ops::MetricId::kDraining, 1);
  // What waits for other ranks would wait in vain: no call of theirs is taken any more.
  rendezvous_.Close(absl::UnavailableError("the shard that hosts the group is going away"));
  // What waits for a checkpoint's moment goes on: nobody is there to say when.
  host_->gate().Sweep(absl::InfiniteFuture());
  const absl::Time end = SteadyNow() + grace;
  lanes_.Drain(grace);
  server_->Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
}

}  // namespace emberd::host
