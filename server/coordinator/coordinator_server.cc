#include "server/coordinator/coordinator_server.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include <grpcpp/impl/service_type.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/lanes.h"
#include "base/periodic_task.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/programs.h"
#include "server/coordinator/services.h"
#include "server/coordinator/train/train_stream.h"
#include "server/ops/samples.h"
#include "server/rpc/budgets.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/local_peers.h"

namespace emberd::coordinator {
namespace {

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
        embedding_service_(
            MakeEmbeddingService(&coordinator_, &train_streams_, local_.get(), environment_)),
        administration_({.coordinator = &coordinator_,
                         .queue = &requests_,
                         .admission = &admission_,
                         .checkpoint_admission = &checkpoint_admission_,
                         .train_streams = &train_streams_,
                         .draining = &draining_,
                         .samples = &samples_,
                         .show_health = [this] { ShowHealth(); },
                         .in_flight_budget_bytes = options.cluster.budgets().in_flight_bytes(),
                         .batch_budget_bytes = options.cluster.budgets().batch_bytes()}),
        admin_admission_(options.cluster.budgets()),
        checkpoint_admission_(options.cluster.budgets()),
        admin_requests_(&options.threads->blocking, kAdminThreads, kAdminWaiting),
        admin_service_(MakeAdminService(&administration_, &coordinator_, AdminEnvironment())),
        checkpoint_requests_(&options.threads->blocking, kCheckpointThreads, kCheckpointsWaiting),
        checkpoint_service_(
            MakeCheckpointService(coordinator_.resources().checkpoints, CheckpointEnvironment())),
        programs_(&coordinator_.resources(),
                  {.coordinator_index = options.coordinator_index,
                   .lease = absl::Milliseconds(options.cluster.timeouts().batch_ttl_ms()),
                   .cpu = &options.threads->cpu,
                   .bytes_per_sparsecore = options.cluster.budgets().bytes_per_sparsecore(),
                   .max_message_bytes = options.cluster.budgets().max_message_bytes(),
                   .draining = &draining_}),
        program_service_(MakeProgramService(&programs_, &samples_, environment_)),
        sweeper_(kServerSweepPeriod, [this] { Sweep(); }) {}

  absl::Status Serve(const CoordinatorServerOptions& options) {
    rpc::GrpcServer::Options server_options;
    server_options.field = absl::StrCat("coordinators[", options.coordinator_index, "].address");
    server_options.address = options.cluster.coordinators(options.coordinator_index).address();
    server_options.max_message_bytes = options.cluster.budgets().max_message_bytes();
    server_options.max_calls_per_connection = options.cluster.budgets().connection_calls();
    server_options.receive_bytes = options.cluster.budgets().in_flight_bytes();
    server_options.security = options.security;
    server_options.services = {embedding_service_.get(), admin_service_.get(),
                               checkpoint_service_.get(), program_service_.get()};
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
  absl::Status Drain(absl::Duration grace) override {
    AutoCheckpoints* const checkpoints = coordinator_.auto_checkpoints();
    const absl::Time stop = SteadyNow() + grace;
    const absl::Time end = checkpoints->saves_at_stop() ? stop - grace * kSaveShare : stop;
    administration_.Stop();
    train_streams_.AwaitNone(std::min(kStepPatience, grace / 2));
    train_streams_.Stop();
    lanes_.Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
    server_->Drain(std::max(end - SteadyNow(), absl::ZeroDuration()));
    // Nobody can change rows through this process any more.
    if (!checkpoints->saves_at_stop()) return absl::OkStatus();
    return checkpoints->SaveAtStop(stop + kSaveOvertime);
  }

 private:
  void Sweep() {
    coordinator_.resources().server_metrics->Set(ops::MetricId::kInFlightBytes, admission_.bytes());
    const absl::Duration standstill = clock_.Standstill(SteadyNow());
    train_streams_.EndSilent(standstill);
    streams_.EndStuck(standstill);
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
    environment.admission = &checkpoint_admission_;
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
  const std::unique_ptr<grpc::Service> embedding_service_;
  Administration administration_;
  rpc::Admission admin_admission_;
  rpc::Admission checkpoint_admission_;
  TaskQueue admin_requests_;
  const std::unique_ptr<grpc::Service> admin_service_;
  TaskQueue checkpoint_requests_;
  const std::unique_ptr<grpc::Service> checkpoint_service_;
  Programs programs_;
  const std::unique_ptr<grpc::Service> program_service_;
  absl::Mutex health_mutex_;
  std::atomic<rpc::GrpcServer*> health_ = nullptr;  // once there is a server
  std::unique_ptr<rpc::GrpcServer> server_;
  rpc::SweepClock clock_;
  PeriodicTask sweeper_;  // the last: it uses the others
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
