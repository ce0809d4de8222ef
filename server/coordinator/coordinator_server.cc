#include "server/coordinator/coordinator_server.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/lanes.h"
#include "base/periodic_task.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "emberd/v1/program_service.grpc.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/calls.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/programs.h"
#include "server/coordinator/train/train_stream.h"
#include "server/coordinator/unary_calls.h"
#include "server/ops/catalogue.h"
#include "server/ops/samples.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/security/security.h"
#include "server/step/activations.h"

namespace emberd::coordinator {
namespace {

// ---- The public services. What each call does stands in Coordinator, UnarySteps, Checkpoints,
// Programs and Administration; of training streams, in train/.

// What the methods of a service have in common.
struct ServiceOptions {
  CallEnvironment environment;
  ops::Metrics* metrics = nullptr;  // hears how long encoding takes; null: nobody does
  ops::Samples* samples = nullptr;  // hears how long each call takes that succeeds; the same
};

// `rpc` is declared in a .proto that this program knows.
const google::protobuf::MethodDescriptor& MethodOf(ops::Rpc rpc) {
  return *google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(absl::StrCat(
      "emberd.v1.", absl::StrReplaceAll(std::string(ops::RpcName(rpc)), {{"/", "."}})));
}

// Its name among the samples: "execute_chained".
std::string SampleName(ops::Rpc rpc) {
  std::string name;
  for (const char c : MethodOf(rpc).name()) {
    if (absl::ascii_isupper(c) && !name.empty()) name.push_back('_');
    name.push_back(absl::ascii_tolower(c));
  }
  return name;
}

// What each method needs beside its work stands here, once. Every method takes and gives bytes:
// requests are decoded on a worker, where what is no message gets a clear status (gRPC's own
// decoding would say UNIMPLEMENTED).
//
// `Service` is made by gRPC's compiler: X::Service. What a subclass serves must outlive it.
template <typename Service>
class BytesService : public Service {
 protected:
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  explicit BytesService(const ServiceOptions& options) : options_(options) {}

  // The method answers with encode(work(context, request, call)), which runs on a worker; what
  // `work` returns is a StatusOr.
  template <typename Request, typename Work,
            typename Encode = absl::StatusOr<Bytes> (*)(const google::protobuf::Message&)>
  void Serve(ops::Rpc rpc, const Work& work, Encode encode = &rpc::EncodeMessage) {
    const auto start = [this, rpc, work, encode](const Context* context, const Bytes* request,
                                                 Bytes* response) {
      auto run = [=, this](rpc::CallContext* call, int64_t* response_bytes) -> absl::Status {
        const absl::Time began = SteadyNow();
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
        ASSIGN_OR_RETURN(const auto result, work(*context, std::move(message), call));
        std::optional<ops::StageTimer> timer;
        if (options_.metrics != nullptr) timer.emplace(options_.metrics, ops::Stage::kEncode);
        absl::StatusOr<Bytes> encoded = encode(result);
        RETURN_IF_ERROR(encoded.status());
        *response = *std::move(encoded);
        timer.reset();
        *response_bytes = static_cast<int64_t>(response->Length());
        if (options_.samples == nullptr) return absl::OkStatus();
        options_.samples->Add(SampleName(rpc), absl::ToDoubleSeconds(SteadyNow() - began));
        return absl::OkStatus();
      };
      return StartPooledCall(options_.environment, *context, rpc,
                             static_cast<int64_t>(request->Length()), std::move(run));
    };
    Mark(rpc, new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(start));
  }

  // The method is one of `target`.
  template <typename Target, typename Request, typename Result>
  void Serve(ops::Rpc rpc, Target* target,
             absl::StatusOr<Result> (Target::*method)(Request, rpc::CallContext*)) {
    using Message = std::decay_t<Request>;
    Serve<Message>(rpc,
                   [target, method](const Context&, Message&& request, rpc::CallContext* call) {
                     return (target->*method)(std::move(request), call);
                   });
  }

  // The method sends what the function gives that a method of `target` returns, until that is
  // nothing. `limit`: how long it may take for callers without a deadline.
  template <typename Target, typename Request, typename Part>
  void ServeParts(ops::Rpc rpc, absl::Duration limit, Target* target,
                  absl::StatusOr<std::function<absl::StatusOr<std::optional<Part>>()>> (
                      Target::*method)(const Request&, rpc::CallContext*)) {
    const auto start = [=, this](const Context* context, const Bytes* request) {
      const auto open = [target, method, request = *request](
                            rpc::CallContext* call) -> absl::StatusOr<NextMessage> {
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(request, &message));
        ASSIGN_OR_RETURN(const auto next, (target->*method)(message, call));
        return [next]() -> absl::StatusOr<std::optional<Bytes>> {
          ASSIGN_OR_RETURN(const std::optional<Part> part, next());
          if (!part.has_value()) return std::nullopt;
          ASSIGN_OR_RETURN(Bytes encoded, rpc::EncodeMessage(*part));
          return encoded;
        };
      };
      return StartPulledStream(options_.environment, *context, rpc, limit, open);
    };
    Mark(rpc, new grpc::internal::CallbackServerStreamingHandler<Bytes, Bytes>(start));
  }

  // The method sends the progress of a method of `target`, and last what that returns.
  template <typename Target, typename Request, typename Progress>
  void ServeProgress(ops::Rpc rpc, absl::Duration limit, Target* target,
                     absl::StatusOr<Progress> (Target::*method)(
                         const Request&, const std::function<absl::Status(const Progress&)>&,
                         rpc::CallContext*)) {
    const auto start = [=, this](const Context* context, const Bytes* request) {
      const auto work = [target, method, request = *request](
                            rpc::CallContext* call, const WriteMessage& write) -> absl::Status {
        const auto report = [&write](const Progress& progress) -> absl::Status {
          ASSIGN_OR_RETURN(Bytes encoded, rpc::EncodeMessage(progress));
          return write(std::move(encoded));
        };
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(request, &message));
        ASSIGN_OR_RETURN(const Progress last, (target->*method)(message, report, call));
        return report(last);
      };
      return StartProgressStream(options_.environment, *context, rpc, limit, work);
    };
    Mark(rpc, new grpc::internal::CallbackServerStreamingHandler<Bytes, Bytes>(start));
  }

  void Mark(ops::Rpc rpc, grpc::internal::MethodHandler* handler) {
    this->MarkMethodRawCallback(MethodOf(rpc).index(), handler);
  }

 private:
  const ServiceOptions options_;
};

class EmbeddingServiceImpl final : public BytesService<v1::EmbeddingService::Service> {
 public:
  EmbeddingServiceImpl(Coordinator* coordinator, TrainStreams* streams, LocalServer* local,
                       const CallEnvironment& environment)
      : BytesService({.environment = environment, .metrics = coordinator->resources().metrics}) {
    Serve(ops::Rpc::kDeclareModel, coordinator, &Coordinator::DeclareModel);
    Serve(ops::Rpc::kDescribeModel, coordinator, &Coordinator::DescribeModel);
    UnarySteps* const steps = coordinator->resources().steps;
    Serve(ops::Rpc::kApplyGradients, steps, &UnarySteps::ApplyGradients);
    Serve(ops::Rpc::kReleaseBatch, steps, &UnarySteps::ReleaseBatch);
    RowAccess* const rows = coordinator->resources().rows;
    Serve(ops::Rpc::kReadRows, rows, &RowAccess::ReadRows);
    Serve(ops::Rpc::kAssignRows, rows, &RowAccess::AssignRows);
    ServeParts(ops::Rpc::kExportTable, environment.default_deadline, rows, &RowAccess::StartExport);
    // The answer is made by hand, so that activations are not copied.
    Serve<v1::LookupRequest>(
        ops::Rpc::kLookup,
        [steps](const Context& context, const v1::LookupRequest& request, rpc::CallContext* call) {
          return steps->Lookup(request, security::RoleOf(context), call);
        },
        &step::EncodeLookupResponse);
    Serve<v1::ShareMemoryRequest>(ops::Rpc::kShareMemory,
                                  [local](const Context& context, const auto&, auto*) {
                                    return rpc::InvitePeer(local, rpc::LocalPeerOf(context));
                                  });
    const auto train = [streams](const Context* context) { return streams->Start(*context); };
    Mark(ops::Rpc::kTrain, new grpc::internal::CallbackBidiHandler<Bytes, Bytes>(train));
  }
};

// How long a call of CheckpointService may take where its caller sets no deadline: large tables
// take hours.
constexpr absl::Duration kCheckpointLimit = absl::Hours(24);

class CheckpointServiceImpl final : public BytesService<v1::CheckpointService::Service> {
 public:
  CheckpointServiceImpl(Checkpoints* checkpoints, const CallEnvironment& environment)
      : BytesService({.environment = environment}) {
    const auto serve = [&](ops::Rpc rpc, auto method) {
      ServeProgress(rpc, kCheckpointLimit, checkpoints, method);
    };
    serve(ops::Rpc::kSaveCheckpoint, &Checkpoints::Save);
    serve(ops::Rpc::kRestoreCheckpoint, &Checkpoints::Restore);
    serve(ops::Rpc::kServeCheckpoint, &Checkpoints::Serve);
    serve(ops::Rpc::kVerifyCheckpoint, &Checkpoints::Verify);
    serve(ops::Rpc::kMergeCheckpoint, &Checkpoints::Merge);
    ServeParts(ops::Rpc::kExportCheckpoint, kCheckpointLimit, checkpoints,
               &Checkpoints::StartExport);
    Serve(ops::Rpc::kDiffCheckpoints, checkpoints, &Checkpoints::Diff);
    Serve(ops::Rpc::kListCheckpoints, checkpoints, &Checkpoints::List);
    Serve(ops::Rpc::kGetCheckpoint, checkpoints, &Checkpoints::Get);
    Serve(ops::Rpc::kDeleteCheckpoint, checkpoints, &Checkpoints::Delete);
  }
};

class ProgramServiceImpl final : public BytesService<v1::ProgramService::Service> {
 public:
  ProgramServiceImpl(Programs* programs, ops::Samples* samples, const CallEnvironment& environment)
      : BytesService(
            {.environment = environment, .metrics = programs->metrics(), .samples = samples}) {
    Serve(ops::Rpc::kCompile, programs, &Programs::Compile);
    Serve(ops::Rpc::kRelease, programs, &Programs::Release);
    Serve(ops::Rpc::kPrepareBatch, programs, &Programs::PrepareBatch);
    Serve(ops::Rpc::kExecute, programs, &Programs::Execute);
    Serve(ops::Rpc::kExecuteChained, programs, &Programs::ExecuteChained);
    Serve(ops::Rpc::kReadHandle, programs, &Programs::ReadHandle);
  }
};

class AdminServiceImpl final : public BytesService<v1::AdminService::Service> {
 public:
  AdminServiceImpl(Administration* administration, Coordinator* coordinator,
                   const CallEnvironment& environment)
      : BytesService({.environment = environment}) {
    Serve(ops::Rpc::kGetStatus, administration, &Administration::GetStatus);
    Serve(ops::Rpc::kGetLimits, coordinator, &Coordinator::GetLimits);
    Serve(ops::Rpc::kSetLimits, coordinator->resources().registry, &ModelRegistry::SetLimits);
    Serve(ops::Rpc::kGetMetrics, administration, &Administration::GetMetrics);
    Serve(ops::Rpc::kGetStats, administration, &Administration::GetStats);
    Serve(ops::Rpc::kDrain, administration, &Administration::Drain);
    Serve(ops::Rpc::kDropModel, coordinator, &Coordinator::DropModel);
    Serve(ops::Rpc::kResetModel, coordinator, &Coordinator::ResetModel);
    Serve(ops::Rpc::kDropGroup, coordinator, &Coordinator::DropGroup);
    Serve(ops::Rpc::kChangeMemory, coordinator, &Coordinator::ChangeMemory);
  }
};

// ---- Small lookups that come over lanes (server/rpc/local_peers.h): each is done on the thread of
// its lane, under the same budgets, checks and statistics as by gRPC, and with the same answer.

// What fits in a packet beside the few bytes before it.
constexpr size_t kMaxLaneBody = lanes::kMaxPacketBytes - 256;

absl::Status LookUpOnLane(const CoordinatorResources& resources, const LaneCall& lane,
                          UnaryCall* call, LaneAnswer* answer) {
  const lanes::Request& sent = lane.request();
  RETURN_IF_ERROR(call->Admit(security::ClientName(sent.authorization, lane.peer().address)));
  rpc::ArenaMessage<v1::LookupRequest> arena_request;
  v1::LookupRequest& request = *arena_request;
  if (!request.ParseFromArray(sent.body.data(), static_cast<int>(sent.body.size()))) {
    return absl::InvalidArgumentError("the request is not a valid emberd.v1.LookupRequest");
  }
  ASSIGN_OR_RETURN(
      const step::LookupOutput output,
      resources.steps->Lookup(request, security::RoleOf(sent.authorization), &call->context));
  ops::StageTimer timer(resources.metrics, ops::Stage::kEncode);
  answer->body = step::EncodeLookupText(output);
  answer->elsewhere = answer->body.size() > kMaxLaneBody;
  // The trainer asks again over gRPC, and so never learns the handle of this batch.
  if (answer->elsewhere && output.batch_handle != 0) {
    resources.path->Discard(request.model_id(), output.batch_handle);
  }
  return absl::OkStatus();
}

// What the arguments point to must outlive the lanes; `security` may be null. The environment's
// queue is not used: there are as many threads as lanes.
LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security) {
  const auto serve = [resources, environment](LaneCall* lane) {
    UnaryCall call(environment, ops::Rpc::kLookup,
                   rpc::DeadlineOf(*lane, environment.default_deadline), lane->request().trace,
                   static_cast<int64_t>(lane->request().body.size()));
    environment.metrics->Add(ops::MetricId::kLaneCalls);
    lane->OnCancel([&call] { call.context.Cancel(); });
    LaneAnswer answer;
    answer.status = LookUpOnLane(*resources, *lane, &call, &answer);
    lane->OnCancel(nullptr);
    if (answer.status.ok()) call.timer.AddResponseBytes(static_cast<int64_t>(answer.body.size()));
    call.End(answer.status);
    return answer;
  };
  return rpc::ServeOnLanes(v1::LOOKUP, "/emberd.v1.EmbeddingService/Lookup", security, serve);
}

// ---- The server

// Requests spend most of their time waiting for shards, so there are more threads than CPUs.
constexpr int kRequestThreads = 32;
// Apart from them, so that operators get answers from a coordinator that has too much to do.
constexpr int kAdminThreads = 2;
constexpr int kAdminWaiting = 64;
// Apart from both, for they may take long.
constexpr int kCheckpointThreads = 8;
constexpr int kCheckpointsWaiting = 64;
// How long the steps of training streams may take to end when the server does, and at most half of
// the whole grace: a stream that is then cut off still gets the answers to what it has sent.
constexpr absl::Duration kStepPatience = absl::Seconds(5);
// Of the grace: what calls that do not end leave for saving models, where that is to be done.
constexpr double kSaveShare = 0.25;
// By so much they may pass the grace: what is not saved is lost. Of the time after which the
// process is cut off (kDrainMarginSeconds in server/launcher/serve.h), the rest is for giving up
// the save under way, for which shards are asked twice that may be silent (kResumeDeadline,
// kCancelDeadline), and for saying so.
constexpr absl::Duration kSaveOvertime = absl::Seconds(2);

// Of fewer bytes, a copy into a message costs a shard no more than to name a place.
constexpr int64_t kWorthSharing = int64_t{64} << 10;

constexpr absl::Duration kServerSweepPeriod = absl::Seconds(1);

// `memory`: of what the shards answer.
std::vector<std::shared_ptr<host::ShardBackend>> ConnectShards(
    const CoordinatorServerOptions& options, const rpc::MemoryBudget& memory) {
  const v1::ClusterConfig& cluster = options.cluster;
  std::vector<std::shared_ptr<host::ShardBackend>> shards;
  for (int i = 0; i < cluster.shards_size(); ++i) {
    shards.push_back(host::MakeRemoteShard(
        {.index = i,
         .address = cluster.shards(i).address(),
         .limits = {cluster.budgets().max_message_bytes(), memory},
         .place = rpc::PlaceOf(cluster, i),
         .security = options.security,
         .share_from_bytes = cluster.transport() == v1::ClusterConfig::TCP ? 0 : kWorthSharing,
         .lanes = cluster.transport() != v1::ClusterConfig::TCP}));
  }
  return shards;
}

class CoordinatorServerImpl final : public CoordinatorServer {
 public:
  // `memory`: budgets.in_flight_bytes.
  CoordinatorServerImpl(const CoordinatorServerOptions& options,
                        std::vector<std::shared_ptr<host::ShardBackend>> shards,
                        const rpc::MemoryBudget& memory)
      : coordinator_(options.cluster, options.coordinator_index, std::move(shards), options.metrics,
                     options.threads),
        admission_(options.cluster.budgets(), memory),
        requests_(&options.threads->blocking, kRequestThreads,
                  options.cluster.budgets().max_waiting_requests(),
                  [metrics = coordinator_.resources().server_metrics](int queued) {
                    metrics->Set(ops::MetricId::kQueuedRequests, queued);
                  }),
        streams_(absl::Milliseconds(options.cluster.timeouts().silent_stream_ms())),
        environment_{.queue = &requests_,
                     .admission = &admission_,
                     .draining = &draining_,
                     .metrics = coordinator_.resources().server_metrics,
                     .default_deadline = coordinator_.resources().shard_call,
                     .slow_call = coordinator_.resources().slow_step,
                     .streams = &streams_},
        train_streams_(
            &coordinator_.resources(), environment_, &options.threads->blocking,
            {.max_streams = options.cluster.budgets().max_train_streams(),
             .silence = absl::Milliseconds(options.cluster.timeouts().silent_stream_ms())}),
        security_(options.security),
        lanes_(MakeLookupHandler(&coordinator_.resources(), environment_, security_.get())),
        local_(rpc::ServeLocally(options.cluster, rpc::LocalPeers::kClients, coordinator_.regions(),
                                 &lanes_)),
        embedding_service_(&coordinator_, &train_streams_, local_.get(), environment_),
        administration_({.coordinator = &coordinator_,
                         .queue = &requests_,
                         .admission = &admission_,
                         .train_streams = &train_streams_,
                         .draining = &draining_,
                         .samples = &samples_,
                         .show_health = [this] { ShowHealth(); },
                         .in_flight_budget_bytes = options.cluster.budgets().in_flight_bytes(),
                         .batch_budget_bytes = options.cluster.budgets().batch_bytes()}),
        admin_admission_(options.cluster.budgets()),
        admin_requests_(&options.threads->blocking, kAdminThreads, kAdminWaiting),
        admin_service_(&administration_, &coordinator_, AdminEnvironment()),
        checkpoint_requests_(&options.threads->blocking, kCheckpointThreads, kCheckpointsWaiting),
        checkpoint_service_(coordinator_.resources().checkpoints, CheckpointEnvironment()),
        programs_(&coordinator_.resources(),
                  {.coordinator_index = options.coordinator_index,
                   .lease = absl::Milliseconds(options.cluster.timeouts().batch_ttl_ms()),
                   .cpu = &options.threads->cpu,
                   .bytes_per_sparsecore = options.cluster.budgets().bytes_per_sparsecore(),
                   .max_message_bytes = options.cluster.budgets().max_message_bytes(),
                   .draining = &draining_}),
        program_service_(&programs_, &samples_, environment_),
        sweeper_(kServerSweepPeriod, [this] { Sweep(); }) {}

  absl::Status Serve(const CoordinatorServerOptions& options) {
    rpc::GrpcServer::Options server_options;
    server_options.field = absl::StrCat("coordinators[", options.coordinator_index, "].address");
    server_options.address = options.cluster.coordinators(options.coordinator_index).address();
    server_options.max_message_bytes = options.cluster.budgets().max_message_bytes();
    server_options.max_calls_per_connection = options.cluster.budgets().connection_calls();
    server_options.receive_bytes = options.cluster.budgets().in_flight_bytes();
    server_options.security = options.security;
    server_options.services = {&embedding_service_, &admin_service_, &checkpoint_service_,
                               &program_service_};
    server_options.service_names = {"emberd.v1.EmbeddingService", "emberd.v1.AdminService",
                                    "emberd.v1.CheckpointService", "emberd.v1.ProgramService"};
    // Whoever asks for the status finds all models there. Shards that do not answer may come later.
    coordinator_.resources().registry->Watch();
    ASSIGN_OR_RETURN(auto server, rpc::GrpcServer::Start(server_options));
    server_ = std::move(server);
    // Somebody may have called Drain already.
    health_ = server_.get();
    ShowHealth();
    return absl::OkStatus();
  }

  std::string address() const override { return server_->address(); }
  Coordinator* coordinator() override { return &coordinator_; }
  Administration* administration() override { return &administration_; }
  void Drain(absl::Duration grace) override {
    AutoCheckpoints* const checkpoints = coordinator_.auto_checkpoints();
    const absl::Time stop = SteadyNow() + grace;
    const absl::Time end = checkpoints->saves_at_stop() ? stop - grace * kSaveShare : stop;
    administration_.Stop();
    train_streams_.AwaitNone(std::min(kStepPatience, grace / 2));
    train_streams_.Stop();
    lanes_.Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
    server_->Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
    // Nobody can change rows through this process any more.
    if (checkpoints->saves_at_stop()) checkpoints->SaveAtStop(stop + kSaveOvertime);
  }

 private:
  void Sweep() {
    coordinator_.resources().server_metrics->Set(ops::MetricId::kInFlightBytes, admission_.bytes());
    train_streams_.EndSilent();
    streams_.EndStuck();
  }
  // Brings the health service up to date.
  void ShowHealth() {
    absl::MutexLock lock(&health_mutex_);  // the last call shows what holds then
    rpc::GrpcServer* const server = health_;
    if (server != nullptr) server->SetServing(!draining_.load());
  }
  CallEnvironment AdminEnvironment() {
    CallEnvironment environment = environment_;
    environment.queue = &admin_requests_;
    environment.waiting_limit = "AdminService";
    environment.admission = &admin_admission_;
    environment.draining = nullptr;
    return environment;
  }
  CallEnvironment CheckpointEnvironment() {
    CallEnvironment environment = AdminEnvironment();
    environment.queue = &checkpoint_requests_;
    environment.waiting_limit = "CheckpointService";
    return environment;
  }

  // In this order: the server goes first, then the workers, then what they work on.
  Coordinator coordinator_;
  rpc::Admission admission_;
  std::atomic<bool> draining_ = false;  // nothing new is taken; the process goes on either way
  TaskQueue requests_;
  StreamWatch streams_;
  const CallEnvironment environment_;
  TrainStreams train_streams_;
  ops::Samples samples_;  // of the calls of ProgramService
  const std::shared_ptr<const security::Security> security_;
  LaneServer lanes_;
  const std::unique_ptr<LocalServer> local_;  // null: nobody is let in
  EmbeddingServiceImpl embedding_service_;
  Administration administration_;
  rpc::Admission admin_admission_;
  TaskQueue admin_requests_;
  AdminServiceImpl admin_service_;
  TaskQueue checkpoint_requests_;
  CheckpointServiceImpl checkpoint_service_;
  Programs programs_;
  ProgramServiceImpl program_service_;
  absl::Mutex health_mutex_;
  std::atomic<rpc::GrpcServer*> health_ = nullptr;  // once there is a server
  std::unique_ptr<rpc::GrpcServer> server_;
  PeriodicTask sweeper_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorServer>> CoordinatorServer::Start(
    CoordinatorServerOptions options) {
  if (options.coordinator_index < 0 ||
      options.coordinator_index >= options.cluster.coordinators_size()) {
    return absl::InvalidArgumentError(absl::StrCat("coordinator index ", options.coordinator_index,
                                                   " is not in 0 .. ",
                                                   options.cluster.coordinators_size() - 1));
  }
  if (options.security == nullptr) {
    ASSIGN_OR_RETURN(auto security,
                     security::Security::Create(options.cluster.security(), options.metrics));
    options.security = std::move(security);
  }
  const rpc::MemoryBudget memory(options.cluster.budgets().in_flight_bytes(),
                                 "budgets.in_flight_bytes");
  std::vector<std::shared_ptr<host::ShardBackend>> shards =
      options.shards.empty() ? ConnectShards(options, memory) : options.shards;
  auto server = std::make_unique<CoordinatorServerImpl>(options, std::move(shards), memory);
  RETURN_IF_ERROR(server->Serve(options));
  return server;
}

}  // namespace emberd::coordinator
