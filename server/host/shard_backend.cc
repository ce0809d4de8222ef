#include "server/host/shard_backend.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/lanes.h"
#include "base/regions.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/group/rendezvous.h"
#include "server/host/shard_codec.h"
#include "server/host/shard_host.h"
#include "server/rpc/call_context.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/rpc/message_stream.h"

namespace emberd::host {

// ---- A shard in this process

namespace {

class LocalGather final : public GatherCall {
 public:
  LocalGather(ShardHost* host, GatherCommand command, std::string name) : name_(std::move(name)) {
    host->Gather(std::move(command), result_.Setter());
  }
  absl::StatusOr<GatherResult> Wait() override {
    absl::StatusOr<GatherResult>& result = result_.Wait();
    if (!result.ok()) return Annotate(result.status(), name_);
    return std::move(result);
  }

 private:
  const std::string name_;
  rpc::Promise<absl::StatusOr<GatherResult>> result_;
};

class LocalApply final : public ApplyCall {
 public:
  LocalApply(ShardHost* host, ApplyCommand command, std::string name)
      : host_(host), name_(std::move(name)) {
    host_->Stage(std::move(command), staged_.Setter());
  }
  absl::StatusOr<StageOutcome> WaitStaged() override {
    absl::StatusOr<ShardHost::StagedApply>& staged = staged_.Wait();
    if (!staged.ok()) return Annotate(staged.status(), name_);
    return staged->outcome;
  }
  void Decide(bool commit) override {
    const ShardHost::StagedApply& staged = *staged_.Wait();
    if (commit) {
      host_->Commit(staged, done_.Setter());
    } else {
      host_->Discard(staged);
      done_.Setter()(RowCounts());
    }
  }
  absl::StatusOr<RowCounts> WaitDone() override {
    absl::StatusOr<RowCounts>& rows = done_.Wait();
    return rows.ok() ? rows : Annotate(rows.status(), name_);
  }

 private:
  ShardHost* const host_;
  const std::string name_;
  rpc::Promise<absl::StatusOr<ShardHost::StagedApply>> staged_;
  rpc::Promise<absl::StatusOr<RowCounts>> done_;
};

class LocalShard final : public ShardBackend {
 public:
  LocalShard(std::unique_ptr<ShardHost> host, int index)
      : name_(absl::StrCat("shard ", index)), host_(std::move(host)) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return address_; }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalGather>(host_.get(), std::move(command), name_);
  }
  bool Lend(const NamedRegion&, absl::Time) override { return true; }  // it is mapped here
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalApply>(host_.get(), std::move(command), name_);
  }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    const absl::Status status = verbs_.Call(verb, request, response, context);
    return IsOfGroup(verb, status) ? status : Annotate(status, name_);
  }

  const std::string name_;
  const std::string address_ = "in-process";
  const std::unique_ptr<ShardHost> host_;
  group::Rendezvous rendezvous_;
  ShardVerbs verbs_{host_.get(), &rendezvous_};
};

// How often who waits for a shard that reads its log is asked whether it still does.
constexpr absl::Duration kLookForStop = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::shared_ptr<ShardBackend>> MakeLocalShard(const v1::ClusterConfig& cluster,
                                                             int shard_index, ops::Metrics* metrics,
                                                             ThreadPools* threads,
                                                             const std::function<bool()>& stopped) {
  ASSIGN_OR_RETURN(std::unique_ptr<ShardHost> host,
                   ShardHost::Create(cluster, shard_index, metrics, threads));
  while (!stopped()) {
    if (!host->WaitUntilReady(kLookForStop)) continue;
    RETURN_IF_ERROR(Annotate(host->CheckReady(), absl::StrCat("shard ", shard_index)));
    return std::make_shared<LocalShard>(std::move(host), shard_index);
  }
  host->Cancel();
  host->WaitUntilReady();
  return absl::CancelledError("the process is ending");
}

// ---- A shard behind gRPC. Long payloads of a step's calls lie in memory that both have, if there
// is some; a shard that does not know the place, because it has been restarted, is sent them after
// all.

namespace {

using internal::v1::ApplyReply;

// How often gRPC is told to look for a shard.
constexpr int64_t kMinLookMs = 1000;

// Says which shard an error came from, and sees that a shard out of reach is looked for without
// pause: gRPC asks for the address of a name that is gone, as a stopped container's is, only every
// two minutes in the end. Thread-safe.
class Reconnector {
 public:
  Reconnector(std::shared_ptr<grpc::Channel> channel, std::string context)
      : channel_(std::move(channel)), context_(std::move(context)) {}

  absl::Status Explain(const absl::Status& status) {
    if (absl::IsUnavailable(status)) LookAgain();
    return Annotate(status, context_);
  }

 private:
  void LookAgain() {
    const int64_t now = absl::ToUnixMillis(SteadyNow());
    int64_t last = last_ms_.load();
    if (std::abs(now - last) < kMinLookMs || !last_ms_.compare_exchange_strong(last, now)) return;
    grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string context_;
  std::atomic<int64_t> last_ms_{0};
};

// The memory that a coordinator has with one shard. Thread-safe.
class ShardMemory {
 public:
  // `from_bytes`: see RemoteShardOptions::share_from_bytes. `budget`: that of messages.
  ShardMemory(int64_t from_bytes, rpc::MemoryBudget budget, ArenaLink::Ask ask)
      : from_bytes_(from_bytes), budget_(std::move(budget)), link_(std::move(ask)) {}

  // Null if so few bytes are not worth it, or there is no memory for them by the deadline.
  std::shared_ptr<SharedBlock> Take(int64_t bytes, absl::Time deadline) {
    if (from_bytes_ == 0 || bytes < from_bytes_) return nullptr;
    const std::shared_ptr<SharedArena> arena = link_.Get(deadline);
    if (arena == nullptr) return nullptr;
    // As a message takes them: what nobody fetches must not fill the machine.
    auto room = budget_.Take(bytes, "a message");
    if (!room.ok()) return nullptr;
    std::shared_ptr<SharedBlock> block = arena->Take(bytes, deadline);
    if (block == nullptr) return nullptr;
    auto counted = std::make_shared<CountedBlock>(CountedBlock{std::move(block), *std::move(room)});
    SharedBlock* const place = counted->block.get();
    return {std::move(counted), place};
  }

  // See ShardBackend.
  bool Lend(const NamedRegion& region, absl::Time deadline) {
    if (from_bytes_ == 0 || region.memory == nullptr) return false;
    const std::shared_ptr<SharedArena> arena = link_.Get(deadline);
    if (arena == nullptr) return false;
    absl::MutexLock lock(&mutex_);
    if (lent_to_.lock() != arena) {
      lent_.clear();
      lent_to_ = arena;
    }
    if (lent_.contains(region.name)) return true;
    TakeBackUnused();
    if (!arena->LendRegion(region.name, *region.memory, deadline)) return false;
    lent_[region.name] = region.memory;
    return true;
  }
  void TakeBackRegions() {
    absl::MutexLock lock(&mutex_);
    TakeBackUnused();
  }

 private:
  // A block, and its bytes in the budget.
  struct CountedBlock {
    std::shared_ptr<SharedBlock> block;
    rpc::MemoryRoom room;
  };

  // Lent regions that are forgotten here.
  void TakeBackUnused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::shared_ptr<SharedArena> arena = lent_to_.lock();
    absl::erase_if(lent_, [&](const auto& lent) {
      if (!lent.second.expired()) return false;
      if (arena != nullptr) arena->TakeBack(lent.first);
      return true;
    });
  }

  const int64_t from_bytes_;
  const rpc::MemoryBudget budget_;
  ArenaLink link_;

  absl::Mutex mutex_;
  std::weak_ptr<SharedArena> lent_to_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, std::weak_ptr<SharedRegion>> lent_ ABSL_GUARDED_BY(mutex_);
};

using OpenStream = std::function<std::unique_ptr<rpc::ClientMessageStream>()>;

v1::SharedBlock PlaceOf(const SharedBlock& block, int64_t bytes) {
  v1::SharedBlock place;
  place.set_region(block.region());
  place.set_offset(block.offset());
  place.set_size(bytes);
  return place;
}

void CopyPayload(const rpc::OutgoingMessage& message, char* to) {
  for (const rpc::SharedBytes& piece : message.payload) {
    std::memcpy(to, piece.bytes.data(), piece.bytes.size());
    to += piece.bytes.size();
  }
}

// A message that may name places in shared memory.
struct Request {
  rpc::OutgoingMessage message;
  std::shared_ptr<SharedBlock> block;  // holds its payload; null: the message does
  // What is sent to a shard that does not know a place; null: the message names none.
  std::function<rpc::OutgoingMessage()> instead;
};

// Of a message with all of its payload, which `block` holds, too, unless it is null. `instead`:
// see Request.
template <typename Header>
Request MakeRequest(rpc::OutgoingMessage message, std::shared_ptr<SharedBlock> block,
                    std::function<rpc::OutgoingMessage()> instead) {
  if (block == nullptr) return {std::move(message), nullptr, std::move(instead)};
  Header place;  // a field at the end is one of the same header
  *place.mutable_payload() = PlaceOf(*block, message.payload_bytes());
  rpc::OutgoingMessage named;
  named.header = message.header + place.SerializeAsString();
  if (instead == nullptr) {
    instead = [message = std::move(message)]() mutable { return std::move(message); };
  }
  return {std::move(named), std::move(block), std::move(instead)};
}

// A call whose request may name places in shared memory.
class PayloadCall {
 public:
  PayloadCall(OpenStream open, Request request)
      : open_(std::move(open)),
        stream_(open_()),
        block_(std::move(request.block)),
        lent_(block_ != nullptr),
        instead_(std::move(request.instead)) {
    if (lent_) block_->Lend();
    stream_->Send(std::move(request.message));
  }

  // The answer to the request.
  absl::StatusOr<rpc::IncomingMessage> ReceiveFirst() {
    absl::StatusOr<rpc::IncomingMessage> answer = stream_->Receive();
    if (instead_ == nullptr || !absl::IsFailedPrecondition(answer.status())) return answer;
    // It may be for another reason, which it then says again.
    stream_ = open_();
    stream_->Send(std::exchange(instead_, nullptr)());
    lent_ = false;  // for good: whoever has the block may still look at it
    return stream_->Receive();
  }
  // The shard does not look at the payload any more.
  void Settle() {
    if (std::exchange(lent_, false)) block_->Settle();
  }
  rpc::ClientMessageStream& stream() { return *stream_; }

 private:
  const OpenStream open_;
  std::unique_ptr<rpc::ClientMessageStream> stream_;
  const std::shared_ptr<SharedBlock> block_;
  bool lent_;  // and not settled
  std::function<rpc::OutgoingMessage()> instead_;
};

rpc::OutgoingMessage EncodeWithoutPlaces(GatherCommand command) {
  command.places = {};
  return EncodeGather(command);
}

class RemoteGather final : public GatherCall {
 public:
  // `room`: where the request wants its answer, and lent; null: in a message.
  RemoteGather(OpenStream open, Request request, std::shared_ptr<SharedBlock> room,
               int64_t room_bytes, Reconnector* reconnector)
      : call_(std::move(open), std::move(request)),
        room_(std::move(room)),
        room_bytes_(room_bytes),
        reconnector_(reconnector) {}

  absl::StatusOr<GatherResult> Wait() override {
    absl::StatusOr<GatherResult> result = Receive();
    if (!result.ok()) return reconnector_->Explain(result.status());
    return result;
  }

 private:
  absl::StatusOr<GatherResult> Receive() {
    ASSIGN_OR_RETURN(const rpc::IncomingMessage message, call_.ReceiveFirst());
    call_.Settle();
    AnswerRoom answer;
    if (room_ != nullptr) {
      // Without an answer, the shard may still be writing there.
      room_->Settle();
      char* const memory = room_->data();
      answer = {std::shared_ptr<char>(std::move(room_), memory),
                static_cast<uint64_t>(room_bytes_)};
    }
    return DecodeGatherResult(message, answer);
  }

  PayloadCall call_;
  std::shared_ptr<SharedBlock> room_;
  const int64_t room_bytes_;
  Reconnector* const reconnector_;
};

class RemoteApply final : public ApplyCall {
 public:
  RemoteApply(OpenStream open, const ApplyCommand& command, Reconnector* reconnector)
      : call_(std::move(open), MakeRequest<internal::v1::ApplyHeader>(
                                   EncodeApply(command), command.block, SentInstead(command))),
        reconnector_(reconnector) {}

  absl::StatusOr<StageOutcome> WaitStaged() override {
    absl::StatusOr<ApplyReply> reply = Read(call_.ReceiveFirst());
    if (!reply.ok()) return reconnector_->Explain(reply.status());
    return StageOutcome{reply->state() == ApplyReply::REPLAYED, RowCountsOf(*reply)};
  }
  void Decide(bool commit) override {
    internal::v1::ApplyDecision decision;
    decision.set_commit(commit);
    call_.stream().Send(rpc::OutgoingMessage::WithHeader(decision));
  }
  absl::StatusOr<RowCounts> WaitDone() override {
    absl::StatusOr<ApplyReply> reply = Read(call_.stream().Receive());
    if (!reply.ok()) return reconnector_->Explain(reply.status());
    return RowCountsOf(*reply);
  }

 private:
  static std::function<rpc::OutgoingMessage()> SentInstead(const ApplyCommand& command) {
    if (command.copied == nullptr) return nullptr;
    return [copied = command.copied] { return EncodeApply(copied()); };
  }

  absl::StatusOr<ApplyReply> Read(const absl::StatusOr<rpc::IncomingMessage>& message) {
    if (!message.ok()) return message.status();
    ApplyReply reply;
    if (!reply.ParseFromString(message->header()))
      return absl::InternalError("its answer is not a valid ApplyReply");
    // What was discarded here may still be held for another attempt, or for the step of a group.
    if (reply.state() == ApplyReply::COMMITTED || reply.state() == ApplyReply::REPLAYED) {
      call_.Settle();
    }
    return reply;
  }

  PayloadCall call_;
  Reconnector* const reconnector_;
};

// `open` begins a call; it, `memory` and `reconnector` must outlive the result.
std::unique_ptr<GatherCall> MakeRemoteGather(OpenStream open, GatherCommand command,
                                             absl::Time deadline, ShardMemory* memory,
                                             Reconnector* reconnector) {
  std::shared_ptr<SharedBlock> room = memory->Take(command.answer_bytes, deadline);
  if (room != nullptr) {
    command.answer = PlaceOf(*room, command.answer_bytes);
    room->Lend();
  }
  rpc::OutgoingMessage message = EncodeGather(command);
  std::shared_ptr<SharedBlock> block = memory->Take(message.payload_bytes(), deadline);
  if (block != nullptr) CopyPayload(message, block->data());
  const int64_t room_bytes = command.answer_bytes;
  std::function<rpc::OutgoingMessage()> instead;
  if (!command.places.stacks.empty()) {
    instead = [command = std::move(command)] { return EncodeWithoutPlaces(command); };
  }
  return std::make_unique<RemoteGather>(
      std::move(open),
      MakeRequest<internal::v1::GatherHeader>(std::move(message), std::move(block),
                                              std::move(instead)),
      std::move(room), room_bytes, reconnector);
}

// Small gathers without gRPC, where the shard is on this machine. See server/rpc/local_peers.h.
class LaneGather final : public GatherCall {
 public:
  // Should the lane break, `by_grpc` gets the command. `limits`: of the answer.
  using GrpcGather = std::function<std::unique_ptr<GatherCall>(GatherCommand command)>;
  LaneGather(std::unique_ptr<LaneClientCall> call, GatherCommand command, rpc::CallContext* context,
             rpc::MessageLimits limits, Reconnector* reconnector, GrpcGather by_grpc)
      : call_(std::move(call)),
        command_(std::move(command)),
        context_(context),
        limits_(std::move(limits)),
        reconnector_(reconnector),
        by_grpc_(std::move(by_grpc)) {
    watch_.emplace(context, [call = call_.get()] { call->Cancel(); });
  }

  absl::StatusOr<GatherResult> Wait() override {
    std::optional<absl::StatusOr<GatherResult>> result = Receive();
    if (!result.has_value()) return by_grpc_(std::move(command_))->Wait();
    if (!result->ok()) return reconnector_->Explain(result->status());
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
    ASSIGN_OR_RETURN(const rpc::IncomingMessage message, rpc::ReadJoined(answer.body, limits_));
    return DecodeGatherResult(message);
  }

  std::unique_ptr<LaneClientCall> call_;
  GatherCommand command_;
  rpc::CallContext* const context_;
  const rpc::MessageLimits limits_;
  Reconnector* const reconnector_;
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

// Beside them, a packet has room for the headers.
constexpr int64_t kSmallGatherBytes = int64_t{32} << 10;
constexpr int64_t kSmallSumsBytes = int64_t{40} << 10;

// What names places in shared memory is not: the other way says what to do with them.
bool IsSmall(const GatherCommand& command) {
  return command.places.stacks.empty() && command.answer_bytes > 0 &&
         command.answer_bytes <= kSmallSumsBytes && PayloadBytes(command) <= kSmallGatherBytes;
}

constexpr char kService[] = "/emberd.internal.v1.ShardService/";

// A restarted shard should be found again soon, not after gRPC's two minutes.
constexpr int kFirstReconnectMs = 50;
constexpr int kConnectTimeoutMs = 5000;
constexpr int kMaxReconnectMs = 500;
// So is one that comes back under another address. gRPC would ask for it every 30 seconds.
constexpr int kMinResolveMs = 1000;

// As many small gathers are under way without gRPC; more go by gRPC.
constexpr int kMaxLanes = 32;

std::shared_ptr<const security::Security> SecurityOf(const RemoteShardOptions& options) {
  if (options.security != nullptr) return options.security;
  return *security::Security::Create({});  // plain text without a token: nothing can be wrong
}

std::shared_ptr<grpc::Channel> MakeChannel(const RemoteShardOptions& options) {
  grpc::ChannelArguments arguments = rpc::ConnectionArguments();
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  // Also the least time that one attempt to connect gets: a busy machine needs more than the pause.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kMinResolveMs);
  security::Security::Metadata metadata = {
      {rpc::kShardPlaceKey, options.place.SerializeAsString()}};
  return SecurityOf(options)->Connect(options.address, arguments, std::move(metadata));
}

class RemoteShard final : public ShardBackend {
 public:
  explicit RemoteShard(RemoteShardOptions options)
      : options_(std::move(options)),
        name_(absl::StrCat("shard ", options_.index)),
        channel_(MakeChannel(options_)),
        reconnector_(channel_, absl::StrCat(name_, " at ", options_.address)),
        messages_(channel_),
        memory_(options_.share_from_bytes, options_.limits.memory,
                [this](absl::Time deadline) { return AskForInvitation(deadline); }),
        security_(SecurityOf(options_)),
        lanes_(kMaxLanes, [this](absl::Time deadline) { return AskForInvitation(deadline); }) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return options_.address; }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext* context) override {
    const auto by_grpc = [this, context](GatherCommand asked) {
      return MakeRemoteGather(Open("Gather", context), std::move(asked), context->deadline(),
                              &memory_, &reconnector_);
    };
    if (!options_.lanes || !IsSmall(command)) return by_grpc(std::move(command));
    const std::string authorization = security_->OwnAuthorization();
    const std::string trace = context->trace();
    const std::string body = rpc::JoinMessage(EncodeGather(command));
    std::unique_ptr<LaneClientCall> call =
        lanes_.Send({.method = v1::GATHER,
                     .patience = context->deadline() - SteadyNow(),
                     .authorization = authorization,
                     .trace = trace,
                     .body = body});
    if (call == nullptr) {
      return std::make_unique<GrowingGather>(&lanes_, by_grpc(std::move(command)),
                                             context->deadline());
    }
    return std::make_unique<LaneGather>(std::move(call), std::move(command), context,
                                        options_.limits, &reconnector_, by_grpc);
  }
  bool Lend(const NamedRegion& region, absl::Time deadline) override {
    return memory_.Lend(region, deadline);
  }
  void TakeBackRegions() override { memory_.TakeBackRegions(); }
  std::shared_ptr<SharedBlock> TakeBlock(int64_t bytes, absl::Time deadline) override {
    return memory_.Take(bytes, deadline);
  }
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext* context) override {
    return std::make_unique<RemoteApply>(Open("Apply", context), command, &reconnector_);
  }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    const absl::Status status = Unary(NameOf(verb), request, response, context);
    return IsOfGroup(verb, status) ? status : reconnector_.Explain(status);
  }

  // `method`: of ShardService. What the stubs of gRPC's compiler do, for messages of any type.
  absl::Status Unary(absl::string_view method, const google::protobuf::MessageLite& request,
                     google::protobuf::MessageLite* response, rpc::CallContext* context) {
    using google::protobuf::MessageLite;
    grpc::ClientContext client_context;
    client_context.set_deadline(ToSystemTime(context->deadline()));
    rpc::SendTrace(context->trace(), &client_context);
    rpc::CancelWatch watch(context, [&client_context] { client_context.TryCancel(); });
    const std::string path = absl::StrCat(kService, method);
    const grpc::internal::RpcMethod rpc(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
    return rpc::FromGrpcStatus(grpc::internal::BlockingUnaryCall<MessageLite, MessageLite>(
        channel_.get(), rpc, &client_context, request, response));
  }

  OpenStream Open(const std::string& method, rpc::CallContext* context) {
    return [this, method = absl::StrCat(kService, method), context] {
      return std::make_unique<rpc::ClientMessageStream>(&messages_, method, context,
                                                        options_.limits);
    };
  }

  absl::StatusOr<LocalInvitation> AskForInvitation(absl::Time deadline) {
    // One that is out of reach would keep its callers waiting here.
    if (channel_->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_READY) {
      return absl::UnavailableError("there is no connection");
    }
    rpc::CallContext context(deadline);
    v1::ShareMemoryResponse response;
    RETURN_IF_ERROR(
        reconnector_.Explain(Unary("ShareMemory", v1::ShareMemoryRequest(), &response, &context)));
    return LocalInvitation{response.socket(), response.ticket()};
  }

  const RemoteShardOptions options_;
  const std::string name_;
  const std::shared_ptr<grpc::Channel> channel_;
  Reconnector reconnector_;
  rpc::MessageChannel messages_;
  ShardMemory memory_;
  const std::shared_ptr<const security::Security> security_;
  LanePool lanes_;
};

}  // namespace

std::shared_ptr<ShardBackend> MakeRemoteShard(RemoteShardOptions options) {
  return std::make_shared<RemoteShard>(std::move(options));
}

}  // namespace emberd::host
