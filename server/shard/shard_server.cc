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
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/wire.h"
#include "server/shard/lane_gather.h"
#include "server/shard/row_calls.h"
#include "server/shard/shard_streams.h"
#include "server/shard/verbs.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

constexpr int kMaxQueuedCalls = 64;

using Service = pb::ShardService;
// Streams of the hot path as bytes, all others as messages.
#define EMBERD_WITH(name, request, response, runs) Service::WithCallbackMethod_##name <
#define EMBERD_CLOSE(name, request, response, runs) >
using Control = EMBERD_SHARD_VERBS(EMBERD_WITH) Service::Service EMBERD_SHARD_VERBS(EMBERD_CLOSE);
#undef EMBERD_WITH
#undef EMBERD_CLOSE
using ShardServiceBase = Service::WithRawCallbackMethod_Gather<
    Service::WithRawCallbackMethod_Apply<Service::WithCallbackMethod_ReadRows<
        Service::WithCallbackMethod_AssignRows<Service::WithCallbackMethod_ShareMemory<Control>>>>>;

// Decodes, hands on to the host, encodes. Never blocks a gRPC thread.
class ShardServiceImpl final : public ShardServiceBase {
 public:
  ShardServiceImpl(ShardHost* host, Rendezvous* rendezvous, const rpc::ShardPlaceCheck* place,
                   RegionServer* regions, LaneServer* lanes, BlockingPool* threads)
      : host_(host),
        verbs_(host, rendezvous),
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

#define EMBERD_VERB(name, request_type, response_type, runs)                                       \
  Reactor* name(Context* context, const request_type* request, response_type* response) override { \
    return Run(ShardVerb::k##name, context, *request, response);                                   \
  }
  EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB

  Reactor* ReadRows(Context* context, const pb::ReadShardRowsRequest* request,
                    pb::ReadShardRowsResponse* response) override {
    return Start(Check(*context), context, [=, this](Reactor* reactor) {
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
    return Start(Check(*context), context, [=, this](Reactor* reactor) {
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

  Reactor* ShareMemory(Context* context, const v1::ShareMemoryRequest*,
                       v1::ShareMemoryResponse* response) override {
    return Start(Check(*context), context, [=, this](Reactor* reactor) {
      UnaryCall call(host_, ops::Rpc::kShardShareMemory, reactor);
      call.End(rpc::InvitePeer(regions_, lanes_, rpc::LanePeerOf(*context)), response);
    });
  }

 private:
  absl::Status Check(const Context& context) const {
    RETURN_IF_ERROR(place_->Check(context));
    return host_->CheckReady();
  }
  // Begins a call with one answer; `work` gets the reactor that it must see finished.
  template <typename Work>
  Reactor* Start(const absl::Status& status, Context* context, const Work& work) {
    Reactor* reactor = context->DefaultReactor();
    if (status.ok()) work(reactor);
    if (!status.ok()) reactor->Finish(rpc::ToGrpcStatus(status));
    return reactor;
  }

  Reactor* Run(ShardVerb verb, Context* context, const google::protobuf::Message& request,
               google::protobuf::Message* response) {
    const VerbRuns runs = RunsOf(verb);
    const absl::Status status =
        runs == VerbRuns::kApart ? place_->Check(*context) : Check(*context);
    return Start(status, context, [&](Reactor* reactor) {
      auto call = std::make_shared<UnaryCall>(host_, ops::ShardRpc(NameOf(verb)), reactor);
      auto work = [=, this, request = &request] {
        if (runs == VerbRuns::kIfHeard && context->IsCancelled()) {
          return call->End(absl::CancelledError("the caller is gone"));
        }
        verbs_.Run(verb, *request, response, [call](const absl::Status& end) { call->End(end); });
      };
      if (runs == VerbRuns::kAtOnce) return work();
      TaskQueue& queue = runs == VerbRuns::kApart ? status_calls_ : slow_calls_;
      if (queue.Submit(std::move(work))) return;
      call->End(absl::ResourceExhaustedError(
          absl::StrCat(queue.max_queued(),
                       " calls that take long wait at this shard already; try again later")));
    });
  }

  ShardHost* const host_;
  ShardVerbs verbs_;
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
  host_->metrics()->Set(ops::MetricId::kDraining, 1);
  // What waits for other ranks would wait in vain: no call of theirs is taken any more.
  rendezvous_.Close(absl::UnavailableError("the shard that hosts the group is going away"));
  // What waits for a checkpoint's moment goes on: nobody is there to say when.
  host_->checkpoints().gate().Sweep(absl::InfiniteFuture());
  const absl::Time end = SteadyNow() + grace;
  if (lanes_ != nullptr) lanes_->Drain(grace);
  server_->Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
}

}  // namespace emberd::server
