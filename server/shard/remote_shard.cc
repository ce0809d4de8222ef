#include <cstring>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/str_cat.h"
#include "base/region_server.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/group/collective_rpc.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message_stream.h"
#include "server/rpc/shard_place.h"
#include "server/rpc/wire.h"
#include "server/shard/lane_gather.h"
#include "server/shard/remote_calls.h"
#include "server/shard/rows_codec.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {
namespace {

constexpr char kService[] = "/emberd.internal.v1.ShardService/";

// A restarted shard should be found again soon, not after gRPC's two minutes.
constexpr int kFirstReconnectMs = 50;
constexpr int kConnectTimeoutMs = 5000;
constexpr int kMaxReconnectMs = 500;
// So is one that comes back under another address. gRPC would ask for it every 30 seconds.
constexpr int kMinResolveMs = 1000;
// A connection that fell silent, because the network was cut or the shard's machine is gone, is
// given up this long after its last sign of life. The kernel alone would try for a quarter of an
// hour. On a starved machine an answer may take seconds.
constexpr int kKeepaliveMs = 10'000;
constexpr int kKeepaliveTimeoutMs = 15'000;

// As many small gathers are under way without gRPC; more go by gRPC.
constexpr int kMaxLanes = 32;

// How long a shard may take to say where memory can be shared.
constexpr absl::Duration kMemoryPatience = absl::Seconds(1);

std::shared_ptr<const security::Security> SecurityOf(const RemoteShardOptions& options) {
  if (options.security != nullptr) return options.security;
  return *security::Security::Create({});  // plain text without a token: nothing can be wrong
}

std::shared_ptr<grpc::Channel> MakeChannel(const RemoteShardOptions& options) {
  grpc::ChannelArguments arguments;
  // Shards stand in the coordinator's own network.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  // Also the least time that one attempt to connect gets: a busy machine needs more than the pause.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kMinResolveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // any number
  // Several clusters may live in one process: connections are not shared.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
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
                [this] { return AskForMemory(); }),
        security_(SecurityOf(options_)),
        lanes_(kMaxLanes, [this](absl::Time deadline) { return AskForLane(deadline); }),
        collective_(MakeRemoteCollective(channel_, reconnector_.context())) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return options_.address; }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext* context) override {
    const auto by_grpc = [this, context](GatherCommand asked) {
      return MakeRemoteGather(Open("Gather", context), std::move(asked), &memory_, &reconnector_);
    };
    if (!options_.lanes) return by_grpc(std::move(command));
    return MakeLaneGather({.lanes = &lanes_,
                           .limits = options_.limits,
                           .authorization = security_->OwnAuthorization(),
                           .reconnector = &reconnector_},
                          std::move(command), context, by_grpc);
  }
  bool Lend(const NamedRegion& region) override { return memory_.Lend(region); }
  void TakeBackRegions() override { memory_.TakeBackRegions(); }
  std::shared_ptr<SharedBlock> TakeBlock(int64_t bytes) override { return memory_.Take(bytes); }
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext* context) override {
    return MakeRemoteApply(Open("Apply", context), command, &reconnector_);
  }

  absl::Status ReadRows(const shard::RowSelection& selection, absl::Span<float> values,
                        rpc::CallContext* context) override {
    internal::v1::ReadShardRowsResponse response;
    RETURN_IF_ERROR(Unary("ReadRows", EncodeRead(selection), &response, context));
    const std::string& bytes = response.values();
    if (bytes.size() != values.size() * sizeof(float)) {
      return absl::InternalError(absl::StrCat(reconnector_.context(), ": ", bytes.size(),
                                              " bytes of rows instead of ",
                                              values.size() * sizeof(float)));
    }
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }

  absl::StatusOr<bool> StageAssign(const AssignCommand& command,
                                   rpc::CallContext* context) override {
    internal::v1::AssignShardRowsRequest request = EncodeAssign(command);
    *request.mutable_mutation() = NameToProto(command.mutation);
    request.set_attempt(command.attempt);
    internal::v1::AssignShardRowsResponse response;
    RETURN_IF_ERROR(Unary("AssignRows", request, &response, context));
    return response.replayed();
  }

  Collective* collective() override { return collective_.get(); }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    return Unary(NameOf(verb), request, response, context);
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
    const grpc::Status status = grpc::internal::BlockingUnaryCall<MessageLite, MessageLite>(
        channel_.get(), rpc, &client_context, request, response);
    return status.ok() ? absl::OkStatus() : reconnector_.Explain(rpc::FromGrpcStatus(status));
  }

  OpenStream Open(const std::string& method, rpc::CallContext* context) {
    return [this, method = absl::StrCat(kService, method), context] {
      return std::make_unique<rpc::ClientMessageStream>(&messages_, method, context,
                                                        options_.limits);
    };
  }

  absl::StatusOr<v1::ShareMemoryResponse> Ask(absl::Time deadline) {
    // One that is out of reach would keep its callers waiting here.
    if (channel_->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_READY) {
      return absl::UnavailableError("there is no connection");
    }
    rpc::CallContext context(deadline);
    v1::ShareMemoryResponse response;
    RETURN_IF_ERROR(Unary("ShareMemory", v1::ShareMemoryRequest(), &response, &context));
    return response;
  }
  absl::StatusOr<RegionServer::Invitation> AskForMemory() {
    ASSIGN_OR_RETURN(const auto invitation, Ask(SteadyNow() + kMemoryPatience));
    return RegionServer::Invitation{invitation.socket(), invitation.ticket()};
  }
  absl::StatusOr<LaneInvitation> AskForLane(absl::Time deadline) {
    ASSIGN_OR_RETURN(const auto invitation, Ask(deadline));
    return LaneInvitation{invitation.lane_socket(), invitation.lane_ticket()};
  }

  const RemoteShardOptions options_;
  const std::string name_;
  const std::shared_ptr<grpc::Channel> channel_;
  Reconnector reconnector_;
  rpc::MessageChannel messages_;
  ShardMemory memory_;
  const std::shared_ptr<const security::Security> security_;
  LanePool lanes_;
  const std::unique_ptr<Collective> collective_;
};

}  // namespace

std::shared_ptr<ShardBackend> MakeRemoteShard(RemoteShardOptions options) {
  return std::make_shared<RemoteShard>(std::move(options));
}

}  // namespace emberd::server
