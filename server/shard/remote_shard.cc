#include <cstring>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/str_cat.h"
#include "base/region_server.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "server/group/collective_rpc.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message_stream.h"
#include "server/rpc/shard_place.h"
#include "server/rpc/wire.h"
#include "server/shard/lane_gather.h"
#include "server/shard/remote_calls.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {
namespace {

using internal::v1::ShardService;

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

template <typename T>
std::string BytesOf(absl::Span<const T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

class RemoteShard final : public ShardBackend {
 public:
  explicit RemoteShard(RemoteShardOptions options)
      : options_(std::move(options)),
        name_(absl::StrCat("shard ", options_.index)),
        channel_(MakeChannel(options_)),
        reconnector_(channel_, absl::StrCat(name_, " at ", options_.address)),
        stub_(ShardService::NewStub(channel_)),
        messages_(channel_),
        memory_(options_.share_from_bytes, options_.limits.memory,
                [this] { return AskForMemory(); }),
        security_(SecurityOf(options_)),
        lanes_(kMaxLanes, [this](absl::Time deadline) { return AskForLane(deadline); }),
        collective_(MakeRemoteCollective(channel_, reconnector_.context())) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return options_.address; }

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::CreateModelResponse>(&ShardService::Stub::CreateModel, request,
                                                    context);
  }
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(
      const internal::v1::FindModelRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::FindModelResponse>(&ShardService::Stub::FindModel, request, context);
  }
  absl::Status ServeModel(const internal::v1::ServeModelRequest& request,
                          rpc::CallContext* context) override {
    return Unary<internal::v1::ServeModelResponse>(&ShardService::Stub::ServeModel, request,
                                                   context)
        .status();
  }
  absl::StatusOr<internal::v1::ListModelsResponse> ListModels(rpc::CallContext* context) override {
    return Unary<internal::v1::ListModelsResponse>(&ShardService::Stub::ListModels,
                                                   internal::v1::ListModelsRequest(), context);
  }
  absl::Status DropModel(const internal::v1::DropModelRequest& request,
                         rpc::CallContext* context) override {
    return Unary<internal::v1::DropModelResponse>(&ShardService::Stub::DropModel, request, context)
        .status();
  }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext* context) override {
    const auto by_grpc = [this, context](GatherCommand asked) {
      return MakeRemoteGather(Open("/emberd.internal.v1.ShardService/Gather", context),
                              std::move(asked), &memory_, &reconnector_);
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
    return MakeRemoteApply(Open("/emberd.internal.v1.ShardService/Apply", context), command,
                           &reconnector_);
  }

  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(
      const internal::v1::OpenGroupRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::OpenGroupResponse>(&ShardService::Stub::OpenGroup, request, context);
  }
  absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
      const internal::v1::DropGroupsRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::DropGroupsResponse>(&ShardService::Stub::DropGroups, request,
                                                   context);
  }
  absl::StatusOr<RowCounts> DecideStep(const internal::v1::DecideStepRequest& request,
                                       rpc::CallContext* context) override {
    ASSIGN_OR_RETURN(const auto response, Unary<internal::v1::DecideStepResponse>(
                                              &ShardService::Stub::DecideStep, request, context));
    return RowCountsOf(response);
  }
  absl::Status RenewBatches(const std::vector<uint64_t>& batch_handles, absl::Duration batch_ttl,
                            rpc::CallContext* context) override {
    internal::v1::RenewBatchesRequest request;
    request.mutable_batch_handles()->Add(batch_handles.begin(), batch_handles.end());
    request.set_batch_ttl_ms(absl::ToInt64Milliseconds(batch_ttl));
    return Unary<internal::v1::RenewBatchesResponse>(&ShardService::Stub::RenewBatches, request,
                                                     context)
        .status();
  }
  absl::Status ReleaseBatch(uint64_t model_id, uint64_t batch_handle,
                            rpc::CallContext* context) override {
    internal::v1::ReleaseBatchRequest request;
    request.set_model_id(model_id);
    request.set_batch_handle(batch_handle);
    return Unary<internal::v1::ReleaseBatchResponse>(&ShardService::Stub::ReleaseBatch, request,
                                                     context)
        .status();
  }

  absl::Status ReadRows(const shard::RowSelection& selection, absl::Span<float> values,
                        rpc::CallContext* context) override {
    ASSIGN_OR_RETURN(const auto response,
                     Unary<internal::v1::ReadShardRowsResponse>(
                         &ShardService::Stub::ReadRows,
                         Select<internal::v1::ReadShardRowsRequest>(selection), context));
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
    auto request = Select<internal::v1::AssignShardRowsRequest>(command.rows);
    request.set_values(BytesOf(command.values));
    *request.mutable_mutation() = NameToProto(command.mutation);
    request.set_attempt(command.attempt);
    ASSIGN_OR_RETURN(const auto response, Unary<internal::v1::AssignShardRowsResponse>(
                                              &ShardService::Stub::AssignRows, request, context));
    return response.replayed();
  }

  absl::StatusOr<MutationVotes::Found> FindMutation(const Mutation& mutation, uint64_t attempt,
                                                    rpc::CallContext* context) override {
    internal::v1::FindMutationRequest request;
    *request.mutable_mutation() = NameToProto(mutation);
    request.set_attempt(attempt);
    ASSIGN_OR_RETURN(const auto found, Unary<internal::v1::FindMutationResponse>(
                                           &ShardService::Stub::FindMutation, request, context));
    return MutationVotes::Found{found.state(), RowCountsOf(found), found.attempt()};
  }
  absl::StatusOr<RowCounts> DecideMutation(const Mutation& mutation, uint64_t attempt, bool commit,
                                           rpc::CallContext* context) override {
    internal::v1::DecideMutationRequest request;
    *request.mutable_mutation() = NameToProto(mutation);
    request.set_attempt(attempt);
    request.set_commit(commit);
    ASSIGN_OR_RETURN(const auto decided,
                     Unary<internal::v1::DecideMutationResponse>(
                         &ShardService::Stub::DecideMutation, request, context));
    return RowCountsOf(decided);
  }
  absl::StatusOr<std::vector<Mutation>> ListUndecided(absl::Duration older_than,
                                                      rpc::CallContext* context) override {
    internal::v1::ListUndecidedRequest request;
    request.set_older_than_ms(absl::ToInt64Milliseconds(older_than));
    ASSIGN_OR_RETURN(const auto listed, Unary<internal::v1::ListUndecidedResponse>(
                                            &ShardService::Stub::ListUndecided, request, context));
    std::vector<Mutation> mutations;
    for (const internal::v1::MutationName& name : listed.mutations()) {
      ASSIGN_OR_RETURN(mutations.emplace_back(), MutationOf(name));
    }
    return mutations;
  }

  absl::StatusOr<internal::v1::PauseChangesResponse> PauseChanges(
      const internal::v1::PauseChangesRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::PauseChangesResponse>(&ShardService::Stub::PauseChanges, request,
                                                     context);
  }
  absl::Status ResumeChanges(const internal::v1::ResumeChangesRequest& request,
                             rpc::CallContext* context) override {
    return Unary<internal::v1::ResumeChangesResponse>(&ShardService::Stub::ResumeChanges, request,
                                                      context)
        .status();
  }
  absl::Status BeginSave(const internal::v1::BeginSaveRequest& request,
                         rpc::CallContext* context) override {
    return Unary<internal::v1::BeginSaveResponse>(&ShardService::Stub::BeginSave, request, context)
        .status();
  }
  absl::Status CompleteSave(const internal::v1::CompleteSaveRequest& request,
                            rpc::CallContext* context) override {
    return Unary<internal::v1::CompleteSaveResponse>(&ShardService::Stub::CompleteSave, request,
                                                     context)
        .status();
  }
  absl::Status BeginRestore(const internal::v1::BeginRestoreRequest& request,
                            rpc::CallContext* context) override {
    return Unary<internal::v1::BeginRestoreResponse>(&ShardService::Stub::BeginRestore, request,
                                                     context)
        .status();
  }
  absl::StatusOr<internal::v1::GetTransferResponse> GetTransfer(
      const internal::v1::GetTransferRequest& request, rpc::CallContext* context) override {
    return Unary<internal::v1::GetTransferResponse>(&ShardService::Stub::GetTransfer, request,
                                                    context);
  }
  absl::Status CancelTransfer(const internal::v1::CancelTransferRequest& request,
                              rpc::CallContext* context) override {
    return Unary<internal::v1::CancelTransferResponse>(&ShardService::Stub::CancelTransfer, request,
                                                       context)
        .status();
  }

  absl::StatusOr<v1::ShardStatus> GetStatus(int hot_rows, rpc::CallContext* context) override {
    internal::v1::GetShardStatusRequest request;
    request.set_hot_rows(hot_rows);
    auto status = Unary<v1::ShardStatus>(&ShardService::Stub::GetStatus, request, context);
    if (status.ok()) status->set_address(options_.address);
    return status;
  }

  absl::StatusOr<v1::ShardMemoryChange> ChangeMemory(const v1::ChangeMemoryRequest& request,
                                                     rpc::CallContext* context) override {
    return Unary<v1::ShardMemoryChange>(&ShardService::Stub::ChangeMemory, request, context);
  }

  Collective* collective() override { return collective_.get(); }

 private:
  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> Unary(Method method, const Request& request, rpc::CallContext* context) {
    grpc::ClientContext client_context;
    client_context.set_deadline(ToSystemTime(context->deadline()));
    rpc::SendTrace(context->trace(), &client_context);
    rpc::CancelWatch watch(context, [&client_context] { client_context.TryCancel(); });
    Response response;
    const grpc::Status status = (stub_.get()->*method)(&client_context, request, &response);
    if (!status.ok()) return reconnector_.Explain(rpc::FromGrpcStatus(status));
    return response;
  }

  OpenStream Open(const std::string& method, rpc::CallContext* context) {
    return [this, method, context] {
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
    return Unary<v1::ShareMemoryResponse>(&ShardService::Stub::ShareMemory,
                                          v1::ShareMemoryRequest(), &context);
  }
  absl::StatusOr<RegionServer::Invitation> AskForMemory() {
    ASSIGN_OR_RETURN(const auto invitation, Ask(SteadyNow() + kMemoryPatience));
    return RegionServer::Invitation{invitation.socket(), invitation.ticket()};
  }
  absl::StatusOr<LaneInvitation> AskForLane(absl::Time deadline) {
    ASSIGN_OR_RETURN(const auto invitation, Ask(deadline));
    return LaneInvitation{invitation.lane_socket(), invitation.lane_ticket()};
  }

  template <typename Request>
  static Request Select(const shard::RowSelection& selection) {
    Request request;
    request.set_model_id(selection.model_id);
    request.set_history(selection.history);
    request.set_stack(selection.stack);
    request.set_slot(selection.slot);
    request.set_partitions(BytesOf(selection.partitions));
    request.set_local_rows(BytesOf(selection.local_rows));
    request.set_columns(selection.columns);
    return request;
  }

  const RemoteShardOptions options_;
  const std::string name_;
  const std::shared_ptr<grpc::Channel> channel_;
  Reconnector reconnector_;
  const std::unique_ptr<ShardService::Stub> stub_;
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
