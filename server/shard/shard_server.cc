#include "server/shard/shard_server.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/blocking_pool.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "server/group/collective_rpc.h"
#include "server/group/group_rules.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/rpc/lanes.h"
#include "server/rpc/shared_regions.h"
#include "server/rpc/wire.h"
#include "server/shard/drop_groups.h"
#include "server/shard/lane_gather.h"
#include "server/shard/row_calls.h"
#include "server/shard/shard_streams.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

constexpr int kMaxQueuedCalls = 64;

using Service = pb::ShardService;
using Lifecycle = Service::WithCallbackMethod_CreateModel<
    Service::WithCallbackMethod_ServeModel<Service::WithCallbackMethod_FindModel<
        Service::WithCallbackMethod_ListModels<Service::WithCallbackMethod_DropModel<
            Service::WithCallbackMethod_ChangeMemory<Service::Service>>>>>>;
using Checkpoints =
    Service::WithCallbackMethod_PauseChanges<Service::WithCallbackMethod_ResumeChanges<
        Service::WithCallbackMethod_BeginSave<Service::WithCallbackMethod_CompleteSave<
            Service::WithCallbackMethod_BeginRestore<Service::WithCallbackMethod_GetTransfer<
                Service::WithCallbackMethod_CancelTransfer<Lifecycle>>>>>>>;
using ShardServiceBase = Service::WithRawCallbackMethod_Gather<Service::WithRawCallbackMethod_Apply<
    Service::WithCallbackMethod_OpenGroup<Service::WithCallbackMethod_DecideStep<
        Service::WithCallbackMethod_DropGroups<Service::WithCallbackMethod_ReleaseBatch<
            Service::WithCallbackMethod_RenewBatches<Service::WithCallbackMethod_ReadRows<
                Service::WithCallbackMethod_AssignRows<Service::WithCallbackMethod_FindMutation<
                    Service::WithCallbackMethod_DecideMutation<
                        Service::WithCallbackMethod_ListUndecided<
                            Service::WithCallbackMethod_GetStatus<
                                Service::WithCallbackMethod_ShareMemory<Checkpoints>>>>>>>>>>>>>>;

// Decodes, hands on to the host, encodes. Never blocks a gRPC thread.
class ShardServiceImpl final : public ShardServiceBase {
 public:
  ShardServiceImpl(ShardHost* host, Rendezvous* rendezvous, const rpc::ShardPlaceCheck* place,
                   RegionServer* regions, LaneServer* lanes, BlockingPool* threads)
      : host_(host),
        rendezvous_(rendezvous),
        place_(place),
        regions_(regions),
        lanes_(lanes),
        limits_(host->limits()),
        slow_calls_(threads, 1, kMaxQueuedCalls),
        status_calls_(threads, 1, kMaxQueuedCalls) {}

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  MessageReactor* Gather(Context* context) override {
    const absl::Status status = Check(*context);
    return status.ok() ? NewGatherStream(host_, *context, limits_, regions_)
                       : NewRefusedStream(status);
  }
  MessageReactor* Apply(Context* context) override {
    const absl::Status status = Check(*context);
    return status.ok() ? NewApplyStream(host_, *context, limits_, regions_)
                       : NewRefusedStream(status);
  }

  // Filling tables takes a while: not on a gRPC thread.
  Reactor* CreateModel(Context* context, const pb::CreateModelRequest* request,
                       pb::CreateModelResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      InQueue(&slow_calls_, reactor, "models are being created already", [=, this] {
        UnaryCall call(host_, ops::Rpc::kShardCreateModel, reactor);
        // Nobody would know of the rows.
        if (context->IsCancelled()) return call.End(absl::CancelledError("the caller is gone"));
        call.End(host_->CreateModel(*request), response);
      });
    });
  }

  Reactor* FindModel(Context* context, const pb::FindModelRequest* request,
                     pb::FindModelResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardFindModel, reactor);
      call.End(host_->FindModel(*request), response);
    });
  }

  Reactor* ServeModel(Context* context, const pb::ServeModelRequest* request,
                      pb::ServeModelResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardServeModel, reactor);
      call.End(host_->ServeModel(*request));
    });
  }

  // After the creation that it may undo.
  Reactor* DropModel(Context* context, const pb::DropModelRequest* request,
                     pb::DropModelResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      InQueue(&slow_calls_, reactor, "models are being created already", [=, this] {
        UnaryCall call(host_, ops::Rpc::kShardDropModel, reactor);
        call.End(host_->DropModel(*request));
      });
    });
  }

  Reactor* ListModels(Context* context, const pb::ListModelsRequest*,
                      pb::ListModelsResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardListModels, reactor);
      *response = host_->ListModels();
      call.End(absl::OkStatus());
    });
  }

  // In turns with those that make and drop models, for which it would wait anyway.
  Reactor* ChangeMemory(Context* context, const v1::ChangeMemoryRequest* request,
                        v1::ShardMemoryChange* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      InQueue(&slow_calls_, reactor, "models are being created already", [=, this] {
        UnaryCall call(host_, ops::Rpc::kShardChangeMemory, reactor);
        call.End(host_->ChangeMemory(*request), response);
      });
    });
  }

  Reactor* OpenGroup(Context* context, const pb::OpenGroupRequest* request,
                     pb::OpenGroupResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardOpenGroup, reactor);
      call.End(host_->OpenGroup(*request), response);
    });
  }

  Reactor* DropGroups(Context* context, const pb::DropGroupsRequest* request,
                      pb::DropGroupsResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardDropGroups, reactor);
      call.End(server::DropGroups(host_, rendezvous_, *request), response);
    });
  }

  Reactor* DecideStep(Context* context, const pb::DecideStepRequest* request,
                      pb::DecideStepResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      auto call = std::make_shared<UnaryCall>(host_, ops::Rpc::kShardDecideStep, reactor);
      host_->DecideStep(*request, [call, response](absl::StatusOr<RowCounts> rows) {
        if (rows.ok()) SetRowCounts(*rows, response);
        call->End(rows.status());
      });
    });
  }

  Reactor* ReleaseBatch(Context* context, const pb::ReleaseBatchRequest* request,
                        pb::ReleaseBatchResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardReleaseBatch, reactor);
      call.End(host_->ReleaseBatch(request->model_id(), request->batch_handle()));
    });
  }

  Reactor* RenewBatches(Context* context, const pb::RenewBatchesRequest* request,
                        pb::RenewBatchesResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      for (const uint64_t handle : request->batch_handles()) {
        host_->RenewBatch(handle, absl::Milliseconds(request->batch_ttl_ms()));
      }
      reactor->Finish(grpc::Status::OK);
    });
  }

  Reactor* ReadRows(Context* context, const pb::ReadShardRowsRequest* request,
                    pb::ReadShardRowsResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      auto call = std::make_shared<RowsCall>(host_, ops::Rpc::kShardReadRows, reactor);
      const absl::Status bad = ReadRequest(*request, limits_, call.get());
      if (!bad.ok()) return call->End(bad);
      host_->ReadRows(call->selection, absl::MakeSpan(call->values),
                      [call, response](const absl::Status& status) {
                        const size_t bytes = call->values.size() * sizeof(float);
                        if (status.ok()) response->set_values(call->values.data(), bytes);
                        call->End(status, status.ok() ? bytes : 0);
                      });
    });
  }

  Reactor* AssignRows(Context* context, const pb::AssignShardRowsRequest* request,
                      pb::AssignShardRowsResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      auto call = std::make_shared<RowsCall>(host_, ops::Rpc::kShardAssignRows, reactor,
                                             request->values().size());
      const absl::Status bad = ReadRequest(*request, limits_, call.get());
      if (!bad.ok()) return call->End(bad);
      host_->StageAssign({call->selection, call->values, call, *MutationOf(request->mutation()),
                          request->attempt()},
                         [call, response](const absl::StatusOr<bool>& replayed) {
                           if (replayed.ok()) response->set_replayed(*replayed);
                           call->End(replayed.status());
                         });
    });
  }

  Reactor* FindMutation(Context* context, const pb::FindMutationRequest* request,
                        pb::FindMutationResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      auto call = std::make_shared<UnaryCall>(host_, ops::Rpc::kShardFindMutation, reactor);
      const absl::StatusOr<Mutation> mutation = MutationOf(request->mutation());
      if (!mutation.ok()) return call->End(mutation.status());
      host_->FindMutation(*mutation, request->attempt(),
                          [call, response](const absl::StatusOr<MutationVotes::Found>& found) {
                            if (found.ok()) {
                              response->set_state(found->state);
                              response->set_attempt(found->attempt);
                              SetRowCounts(found->rows, response);
                            }
                            call->End(found.status());
                          });
    });
  }

  Reactor* DecideMutation(Context* context, const pb::DecideMutationRequest* request,
                          pb::DecideMutationResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      auto call = std::make_shared<UnaryCall>(host_, ops::Rpc::kShardDecideMutation, reactor);
      const absl::StatusOr<Mutation> mutation = MutationOf(request->mutation());
      if (!mutation.ok()) return call->End(mutation.status());
      host_->DecideMutation(*mutation, request->attempt(), request->commit(),
                            [call, response](const absl::StatusOr<RowCounts>& rows) {
                              if (rows.ok()) SetRowCounts(*rows, response);
                              call->End(rows.status());
                            });
    });
  }

  Reactor* ListUndecided(Context* context, const pb::ListUndecidedRequest* request,
                         pb::ListUndecidedResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      for (const Mutation& mutation :
           host_->Undecided(absl::Milliseconds(request->older_than_ms()))) {
        *response->add_mutations() = NameToProto(mutation);
      }
      reactor->Finish(grpc::Status::OK);
    });
  }

  Reactor* PauseChanges(Context* context, const pb::PauseChangesRequest* request,
                        pb::PauseChangesResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardPauseChanges, reactor);
      call.End(host_->checkpoints().Pause(*request), response);
    });
  }

  Reactor* ResumeChanges(Context* context, const pb::ResumeChangesRequest* request,
                         pb::ResumeChangesResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardResumeChanges, reactor);
      call.End(host_->checkpoints().Resume(*request));
    });
  }

  Reactor* BeginSave(Context* context, const pb::BeginSaveRequest* request,
                     pb::BeginSaveResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardBeginSave, reactor);
      call.End(host_->checkpoints().BeginSave(*request));
    });
  }

  Reactor* CompleteSave(Context* context, const pb::CompleteSaveRequest* request,
                        pb::CompleteSaveResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardCompleteSave, reactor);
      call.End(host_->checkpoints().CompleteSave(*request));
    });
  }

  Reactor* BeginRestore(Context* context, const pb::BeginRestoreRequest* request,
                        pb::BeginRestoreResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardBeginRestore, reactor);
      call.End(host_->checkpoints().BeginRestore(*request));
    });
  }

  Reactor* GetTransfer(Context* context, const pb::GetTransferRequest* request,
                       pb::GetTransferResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardGetTransfer, reactor);
      call.End(host_->checkpoints().GetTransfer(*request), response);
    });
  }

  Reactor* CancelTransfer(Context* context, const pb::CancelTransferRequest* request,
                          pb::CancelTransferResponse*) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardCancelTransfer, reactor);
      call.End(host_->checkpoints().Cancel(*request));
    });
  }

  Reactor* ShareMemory(Context* context, const v1::ShareMemoryRequest*,
                       v1::ShareMemoryResponse* response) override {
    return Start(context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardShareMemory, reactor);
      auto invitation = rpc::InvitePeer(regions_);
      rpc::InviteToLane(lanes_, rpc::LanePeerOf(*context), &invitation);
      call.End(std::move(invitation), response);
    });
  }

  Reactor* GetStatus(Context* context, const pb::GetShardStatusRequest* request,
                     v1::ShardStatus* response) override {
    return StartIf(place_->Check(*context), context, [=, this](Reactor* reactor) {
      InQueue(&status_calls_, reactor, "calls of it wait already", [=, this] {
        UnaryCall call(host_, ops::Rpc::kShardGetStatus, reactor);
        const absl::Status status = CheckHotRows(request->hot_rows());
        if (status.ok()) *response = host_->GetStatus(request->hot_rows());
        call.End(status);
      });
    });
  }

 private:
  // Begins a unary call; `work` gets the reactor that it must see finished.
  template <typename Work>
  Reactor* Start(Context* context, const Work& work) {
    return StartIf(Check(*context), context, work);
  }
  absl::Status Check(const Context& context) const {
    RETURN_IF_ERROR(place_->Check(context));
    return host_->CheckReady();
  }
  template <typename Work>
  static Reactor* StartIf(const absl::Status& status, Context* context, const Work& work) {
    Reactor* reactor = context->DefaultReactor();
    if (status.ok()) work(reactor);
    if (!status.ok()) reactor->Finish(rpc::ToGrpcStatus(status));
    return reactor;
  }
  // `full` goes on after "64 ".
  template <typename Work>
  static void InQueue(TaskQueue* queue, Reactor* reactor, absl::string_view full, Work work) {
    if (queue->Submit(std::move(work))) return;
    reactor->Finish(rpc::ToGrpcStatus(
        absl::ResourceExhaustedError(absl::StrCat(queue->max_queued(), " ", full))));
  }

  ShardHost* const host_;
  Rendezvous* const rendezvous_;
  const rpc::ShardPlaceCheck* const place_;
  RegionServer* const regions_;  // null: no memory is shared
  LaneServer* const lanes_;      // null: all calls come by gRPC
  const rpc::MessageLimits limits_;
  TaskQueue slow_calls_;
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

  GrpcServer::Options serving;
  serving.field = absl::StrCat("shards[", options.shard_index, "].address");
  serving.address = options.cluster.shards(options.shard_index).address();
  serving.max_message_bytes = options.cluster.budgets().max_message_bytes();
  serving.receive_bytes = options.cluster.budgets().in_flight_bytes();
  serving.security = options.security;
  serving.services = {server->shard_service_.get(), server->collective_service_.get()};
  serving.service_names = {"emberd.internal.v1.ShardService",
                           "emberd.internal.v1.CollectiveService"};
  ASSIGN_OR_RETURN(server->server_, GrpcServer::Start(serving));
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
      regions_(rpc::StartShardRegions(options.cluster)),
      security_(options.security),
      lanes_(
          rpc::StartShardLanes(options.cluster, MakeGatherHandler(host_.get(), security_.get()))),
      shard_service_(std::make_unique<ShardServiceImpl>(host_.get(), &rendezvous_, &place_,
                                                        regions_.get(), lanes_.get(),
                                                        &options.threads->blocking)),
      collective_service_(MakeCollectiveService(&rendezvous_, host_->metrics(), &place_)) {}

ShardServer::~ShardServer() {
  host_->Cancel();
  if (ready_.joinable()) ready_.join();
}

void ShardServer::Drain(absl::Duration grace) {
  host_->metrics()->SetDraining(true);
  // What waits for other ranks would wait in vain: no call of theirs is taken any more.
  rendezvous_.Close(absl::UnavailableError("the shard that hosts the group is going away"));
  // What waits for a checkpoint's moment goes on: nobody is there to say when.
  host_->checkpoints().gate().Sweep(absl::InfiniteFuture());
  const absl::Time end = SteadyNow() + grace;
  if (lanes_ != nullptr) lanes_->Drain(grace);
  server_->Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
}

}  // namespace emberd::server
