#include <memory>
#include <string>
#include <utility>

#include <google/protobuf/text_format.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/launcher/serve.h"
#include "server/launcher/supervisor.h"
#include "server/launcher/up.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"

namespace emberd::launcher {
namespace {

// Coordinators stop first: they finish what they accepted, for which they need the shards.
constexpr int kShardStage = 0;
constexpr int kCoordinatorStage = 1;

// The children read their configuration from a file in a scratch directory. Shards start first, on
// ports that the system may pick; the file is then written again with the real addresses, which
// coordinators connect to and to which a restarted shard returns.
class ProcessCluster {
 public:
  ProcessCluster(const UpOptions& options, const ops::ShutdownSignal& shutdown,
                 std::string directory)
      : options_(options),
        directory_(std::move(directory)),
        cluster_(options.cluster),
        supervisor_(MakeSupervisorOptions(options, shutdown)) {}

  absl::Status Start() {
    absl::Status status =
        StartGroup("shard", kShardStage, cluster_.mutable_shards(), &info_.shards);
    if (!status.ok()) return status;
    status = StartGroup("coordinator", kCoordinatorStage, cluster_.mutable_coordinators(),
                        &info_.coordinators);
    if (!status.ok()) return status;
    info_.shard_count = cluster_.shards_size();
    info_.sparsecores_per_shard = cluster_.sparsecores_per_shard();
    info_.https = cluster_.security().has_tls();
    return absl::OkStatus();
  }

  absl::Status Run() { return supervisor_.Run(); }
  void Stop() { supervisor_.Stop(); }
  const ClusterInfo& info() const { return info_; }

 private:
  static SupervisorOptions MakeSupervisorOptions(const UpOptions& options,
                                                 const ops::ShutdownSignal& shutdown) {
    SupervisorOptions result;
    result.stop_requested = [&shutdown](absl::Duration limit) { return shutdown.WaitFor(limit); };
    result.restart = options.restart;
    // A child ends by itself within its own deadline; the second on top is for its exit.
    result.stop_timeout = absl::Milliseconds(options.cluster.timeouts().drain_ms()) +
                          absl::Seconds(kDrainMarginSeconds + 1);
    return result;
  }

  std::string ConfigPath() const { return directory_ + "/cluster.textproto"; }

  absl::Status WriteConfig() const {
    std::string text;
    google::protobuf::TextFormat::PrintToString(cluster_, &text);
    return WriteFileAtomically(ConfigPath(), text);
  }

  ProcessSpec Spec(const std::string& role, int index, int stage) const {
    const std::string name = absl::StrCat(role, "-", index);
    ProcessSpec spec;
    spec.name = name;
    spec.ready_file = absl::StrCat(directory_, "/", name, ".ready");
    spec.argv = {options_.program,      role,           "--config",     ConfigPath(), "--index",
                 std::to_string(index), "--ready-file", spec.ready_file};
    if (options_.insecure) spec.argv.emplace_back("--insecure");
    spec.stage = stage;
    return spec;
  }

  // Starts all of one kind, waits for them, and writes down where they listen. `processes` is a
  // repeated field of ShardConfig or CoordinatorConfig.
  template <typename Processes>
  absl::Status StartGroup(const std::string& role, int stage, Processes* processes,
                          std::vector<ReadyInfo>* ready) {
    absl::Status status = WriteConfig();
    if (!status.ok()) return status;
    std::vector<int> numbers;
    for (int i = 0; i < processes->size(); ++i) {
      absl::StatusOr<int> number = supervisor_.Start(Spec(role, i, stage));
      if (!number.ok()) return number.status();
      numbers.push_back(*number);
    }
    for (int i = 0; i < processes->size(); ++i) {
      absl::StatusOr<ReadyInfo> info = supervisor_.WaitReady(numbers[i]);
      if (!info.ok()) return info.status();
      (*processes)[i].set_address(info->grpc);
      (*processes)[i].set_http_address(info->http);
      ready->push_back(*std::move(info));
    }
    return WriteConfig();
  }

  const UpOptions& options_;
  const std::string directory_;
  v1::ClusterConfig cluster_;
  ClusterInfo info_;
  Supervisor supervisor_;
};

absl::Status CheckAllAddresses(const UpOptions& options) {
  const v1::ClusterConfig& cluster = options.cluster;
  absl::Status status;
  for (int i = 0; status.ok() && i < cluster.shards_size(); ++i) {
    status = CheckAddresses(absl::StrCat("shards[", i, "]"), cluster.shards(i).address(),
                            cluster.shards(i).http_address(), cluster.security(), options.insecure);
  }
  for (int i = 0; status.ok() && i < cluster.coordinators_size(); ++i) {
    status = CheckAddresses(
        absl::StrCat("coordinators[", i, "]"), cluster.coordinators(i).address(),
        cluster.coordinators(i).http_address(), cluster.security(), options.insecure);
  }
  return status;
}

}  // namespace

absl::Status UpProcesses(const UpOptions& options) {
  auto shutdown = ops::ShutdownSignal::Create();
  if (!shutdown.ok()) return shutdown.status();
  absl::Status status = ops::SetUpLogging(options.cluster.logging(), "up");
  if (status.ok()) status = CheckAllAddresses(options);
  if (!status.ok()) return status;
  auto directory = ScratchDirectory::Create();
  if (!directory.ok()) return directory.status();

  ProcessCluster cluster(options, **shutdown, (*directory)->path());
  status = cluster.Start();
  if (status.ok()) {
    PrintReady(cluster.info(), options.cluster.logging());
    status = cluster.Run();
  }
  cluster.Stop();
  if (absl::IsCancelled(status)) return absl::OkStatus();  // stopped while starting: as asked
  if (status.ok()) ops::Log(ops::LogLevel::kInfo, "stopped");
  return status;
}

}  // namespace emberd::launcher
