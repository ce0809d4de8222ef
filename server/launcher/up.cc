#include "server/launcher/up.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include <google/protobuf/text_format.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/machine_memory.h"
#include "base/periodic_task.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "base/thread_pools.h"
#include "config/config.h"
#include "server/coordinator/coordinator_server.h"
#include "server/host/shard_backend.h"
#include "server/launcher/serve.h"
#include "server/launcher/shard_count.h"
#include "server/launcher/supervisor.h"
#include "server/launcher/verbs.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::launcher {
namespace {

// `page`: what is to be looked at first.
std::string Row(const std::string& name, const ReadyInfo& process, const std::string& scheme,
                const char* page) {
  std::string row = absl::StrFormat("  %-14s %-22s pid %-8d", name, process.grpc, process.pid);
  if (!process.http.empty()) absl::StrAppend(&row, scheme, process.http, page);
  return row + "\n";
}

// `field` of every process, separated by commas.
template <typename T>
std::string Joined(const std::vector<ReadyInfo>& processes, T ReadyInfo::*field) {
  return absl::StrJoin(processes, ",", [field](std::string* out, const ReadyInfo& process) {
    absl::StrAppend(out, process.*field);
  });
}

// The banner, unless the log goes to standard error as JSON, and the ready line.
void PrintReady(const ClusterInfo& info) {
  const v1::LoggingConfig& logging = info.cluster.logging();
  const bool json_log = logging.format() == v1::LoggingConfig::JSON && logging.file().empty();
  if (!json_log) std::fputs(Banner(info).c_str(), stderr);
  std::printf("%s\n", ReadyLine(info).c_str());
  std::fflush(stdout);
}

// What to set so that the tables of all shards leave the other half of the memory free.
std::string MemoryAdvice(v1::ClusterConfig cluster, int64_t memory) {
  const int64_t now = cluster.budgets().bytes_per_sparsecore();
  cluster.clear_budgets();
  config::FillBudgets(memory, &cluster);
  return absl::StrCat("set budgets.bytes_per_sparsecore to ",
                      std::min(now, cluster.budgets().bytes_per_sparsecore()), " or less (now ",
                      now, "): there are ", memory, " bytes of memory for ",
                      config::ShardsOnOneHost(cluster), " shards with ",
                      cluster.sparsecores_per_shard(), " SparseCores each");
}

// Coordinators stop first: they finish what they accepted, for which they need the shards.
constexpr int kShardStage = 0;
constexpr int kCoordinatorStage = 1;

// The children read their configuration from a file in a scratch directory. Shards start first, on
// ports that the system may pick; the file is then written again with the real addresses, which
// coordinators connect to and to which a restarted shard returns.
class ProcessCluster {
 public:
  // `hangup` is set when the processes are to be sent SIGHUP.
  ProcessCluster(const UpOptions& options, const ops::ShutdownSignal& shutdown,
                 std::atomic<bool>* hangup, std::string directory)
      : options_(options),
        directory_(std::move(directory)),
        info_{.cluster = options.cluster},
        supervisor_(MakeSupervisorOptions(options, shutdown, hangup)) {}

  absl::Status Start() {
    v1::ClusterConfig& cluster = info_.cluster;
    RETURN_IF_ERROR(StartAll("shard", kShardStage, cluster.mutable_shards(), &info_.shards));
    return StartAll("coordinator", kCoordinatorStage, cluster.mutable_coordinators(),
                    &info_.coordinators);
  }

  absl::Status Run() { return supervisor_.Run(); }
  absl::Status Stop() { return supervisor_.Stop(); }
  // UNAVAILABLE: no coordinator is there, which with durability CHECKPOINT would save at the stop.
  absl::Status CheckCanSave() const {
    if (options_.cluster.storage().durability() != v1::StorageConfig::CHECKPOINT) {
      return absl::OkStatus();
    }
    const int shards = static_cast<int>(info_.shards.size());  // were started first
    for (int i = 0; i < static_cast<int>(info_.coordinators.size()); ++i) {
      if (supervisor_.ready(shards + i)) return absl::OkStatus();
    }
    return absl::UnavailableError(
        "no coordinator was there to save; what has changed since the newest checkpoints, if "
        "anything, is lost");
  }
  const ClusterInfo& info() const { return info_; }

 private:
  static SupervisorOptions MakeSupervisorOptions(const UpOptions& options,
                                                 const ops::ShutdownSignal& shutdown,
                                                 std::atomic<bool>* hangup) {
    SupervisorOptions result;
    result.stop_requested = [&shutdown](absl::Duration limit) { return shutdown.WaitFor(limit); };
    result.take_hangup = [hangup] { return hangup->exchange(false); };
    result.restart = options.restart;
    result.memory_advice = MemoryAdvice(options.cluster, ReadMachineMemory().limit);
    // A child ends by itself within its own deadline; the second on top is for its exit.
    result.stop_timeout = absl::Milliseconds(options.cluster.timeouts().drain_ms()) +
                          absl::Seconds(kDrainMarginSeconds + 1);
    return result;
  }

  std::string ConfigPath() const { return directory_ + "/cluster.textproto"; }

  absl::Status WriteConfig() const {
    std::string text;
    google::protobuf::TextFormat::PrintToString(info_.cluster, &text);
    return WriteFileAtomically(ConfigPath(), text);
  }

  ProcessSpec Spec(const std::string& role, int index, int stage) const {
    ProcessSpec spec;
    spec.name = absl::StrCat(role, "-", index);
    spec.ready_file = absl::StrCat(directory_, "/", spec.name, ".ready");
    spec.argv = {options_.program,      role,           "--config",     ConfigPath(), "--index",
                 std::to_string(index), "--ready-file", spec.ready_file};
    if (options_.insecure) spec.argv.emplace_back("--insecure");
    spec.stage = stage;
    return spec;
  }

  // Starts all of one kind, waits for them, and writes down where they listen. `processes` is a
  // repeated field of ShardConfig or CoordinatorConfig.
  template <typename Processes>
  absl::Status StartAll(const std::string& role, int stage, Processes* processes,
                        std::vector<ReadyInfo>* ready) {
    RETURN_IF_ERROR(WriteConfig());
    std::vector<int> numbers(processes->size());
    for (int i = 0; i < processes->size(); ++i) {
      ASSIGN_OR_RETURN(numbers[i], supervisor_.Start(Spec(role, i, stage)));
    }
    for (int i = 0; i < processes->size(); ++i) {
      ASSIGN_OR_RETURN(ReadyInfo info, supervisor_.WaitReady(numbers[i]));
      (*processes)[i].set_address(info.grpc);
      (*processes)[i].set_http_address(info.http);
      ready->push_back(std::move(info));
    }
    return WriteConfig();
  }

  const UpOptions& options_;
  const std::string directory_;
  ClusterInfo info_;
  Supervisor supervisor_;
};

// What SIGHUP does with a file of the log or of spans. Without any, it stops the cluster, as when a
// terminal is closed.
std::function<void()> OnHangup(const v1::LoggingConfig& logging, std::function<void()> with_file) {
  if (logging.file().empty() && logging.span_file().empty()) return nullptr;
  return with_file;
}

absl::Status CheckAllAddresses(const UpOptions& options) {
  const v1::ClusterConfig& cluster = options.cluster;
  const auto check = [&](const char* list, const auto& processes) {
    for (int i = 0; i < processes.size(); ++i) {
      RETURN_IF_ERROR(CheckAddresses(absl::StrCat(list, "[", i, "]"), processes[i].address(),
                                     processes[i].http_address(), cluster.security(),
                                     options.insecure));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(check("shards", cluster.shards()));
  return check("coordinators", cluster.coordinators());
}

// Once all shards have read their logs. Null: there are none to remove.
std::unique_ptr<PeriodicTask> RemoveOldLogsLater(const UpOptions& options,
                                                 const ClusterInfo& info) {
  if (!HasOldLogs(options.cluster)) return nullptr;
  const auto security = security::Security::Create(options.cluster.security());
  if (!security.ok()) return nullptr;  // the next start removes them
  return std::make_unique<PeriodicTask>(
      absl::Seconds(1), [&options, shards = info.shards, security = *security] {
        if (!HasOldLogs(options.cluster)) return;  // nobody is asked any more
        const bool ready = std::all_of(shards.begin(), shards.end(), [&](const ReadyInfo& shard) {
          return CheckHealth({.address = shard.grpc, .security = security}).ok();
        });
        if (ready) RemoveOldLogs(options.cluster);
      });
}

}  // namespace

std::string Banner(const ClusterInfo& info) {
  const v1::ClusterConfig& cluster = info.cluster;
  const std::string scheme = cluster.security().has_tls() ? "https://" : "http://";
  std::string text =
      absl::StrCat("emberd ", EMBERD_VERSION, ": ", cluster.shards_size(),
                   cluster.shards_size() == 1 ? " shard" : " shards", " with ",
                   cluster.sparsecores_per_shard(), " SparseCores each, ",
                   info.shards.empty() ? "all in this process" : "one process each", "\n");
  for (size_t i = 0; i < info.coordinators.size(); ++i) {
    absl::StrAppend(&text, Row(absl::StrCat("coordinator ", i), info.coordinators[i], scheme, "/"));
  }
  for (size_t i = 0; i < info.shards.size(); ++i) {
    absl::StrAppend(&text, Row(absl::StrCat("shard ", i), info.shards[i], scheme, "/metrics"));
  }
  if (const std::string& folder = cluster.storage().checkpoints(); !folder.empty()) {
    absl::StrAppend(&text, absl::StrFormat("  %-14s %s\n", "checkpoints", folder));
  }
  return absl::StrCat(text, "Stop it with Ctrl-C or: kill ", getpid(), "\n");
}

std::string ReadyLine(const ClusterInfo& info) {
  std::vector<ReadyInfo> all = info.coordinators;
  all.insert(all.end(), info.shards.begin(), info.shards.end());
  std::string line =
      absl::StrCat("emberd: ready coordinator=", Joined(info.coordinators, &ReadyInfo::grpc),
                   " http=", Joined(info.coordinators, &ReadyInfo::http),
                   " shards=", info.cluster.shards_size(), " pids=", Joined(all, &ReadyInfo::pid));
  if (!info.shards.empty()) {
    absl::StrAppend(&line, " shard_grpc=", Joined(info.shards, &ReadyInfo::grpc),
                    " shard_http=", Joined(info.shards, &ReadyInfo::http));
  }
  return line;
}

absl::Status UpEmbedded(const UpOptions& options) {
  const v1::ClusterConfig& cluster = options.cluster;
  const auto on_hangup = [] {
    ops::ReopenLog();
    rpc::ReopenSpans();
  };
  ASSIGN_OR_RETURN(
      const auto shutdown,
      ops::ShutdownSignal::Create(options.stop_on_eof, OnHangup(cluster.logging(), on_hangup)));
  RETURN_IF_ERROR(ops::SetUpLogging(cluster.logging(), "up"));
  RETURN_IF_ERROR(rpc::SetUpSpans(cluster.logging().span_file(), "up"));
  if (cluster.coordinators_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("coordinators: ", cluster.coordinators_size(),
                     " are not allowed in one process; use 1, or --processes"));
  }
  const v1::CoordinatorConfig& coordinator = cluster.coordinators(0);
  RETURN_IF_ERROR(CheckAddresses("coordinators[0]", coordinator.address(),
                                 coordinator.http_address(), cluster.security(), options.insecure));
  RETURN_IF_ERROR(CheckStorage(cluster));

  const auto stopped = [&] { return shutdown->WaitFor(absl::ZeroDuration()); };
  const absl::Status fit = FitLogsToShards(cluster, stopped);
  if (!fit.ok()) return absl::IsCancelled(fit) ? absl::OkStatus() : fit;

  ops::Metrics metrics("up");
  ASSIGN_OR_RETURN(const auto security, security::Security::Create(cluster.security(), &metrics));
  // After `shutdown`, whose signals no thread may take.
  ThreadPools threads(
      std::max(cluster.coordinator_threads(), cluster.shards_size() * cluster.shard_threads()));
  std::atomic<bool> ending = false;
  std::vector<std::shared_ptr<host::ShardBackend>> shards(cluster.shards_size());
  for (int i = 0; i < cluster.shards_size(); ++i) {
    auto shard = host::MakeLocalShard(cluster, i, &metrics, &threads, stopped);
    if (absl::IsCancelled(shard.status())) return absl::OkStatus();
    ASSIGN_OR_RETURN(shards[i], std::move(shard));
  }
  ASSIGN_OR_RETURN(auto server, coordinator::CoordinatorServer::Start({.cluster = cluster,
                                                                       .coordinator_index = 0,
                                                                       .shards = std::move(shards),
                                                                       .metrics = &metrics,
                                                                       .threads = &threads,
                                                                       .security = security}));
  const auto serving = [&ending] { return !ending; };
  ASSIGN_OR_RETURN(auto http, StartHttp(coordinator.http_address(),
                                        CoordinatorPages("up", 0, cluster, *security, server.get(),
                                                         metrics, serving),
                                        *security));
  auto watch = WatchCredentials(security.get(), http.get());
  const ReadyInfo ready = {
      .grpc = server->address(), .http = http == nullptr ? "" : http->address(), .pid = getpid()};
  ops::Log(ops::LogLevel::kInfo, "serving", {{"grpc", ready.grpc}, {"http", ready.http}});
  PrintReady({.cluster = cluster, .coordinators = {ready}});
  RemoveOldLogs(cluster);
  return DrainOnSignal(*shutdown, cluster.timeouts(), [&](absl::Duration limit) {
    ending = true;
    absl::Status drained = server->Drain(limit);
    watch.reset();
    http.reset();
    server.reset();
    return drained;
  });
}

absl::Status UpProcesses(const UpOptions& options) {
  std::atomic<bool> hangup = false;
  const auto on_hangup = [&hangup] {
    ops::ReopenLog();
    hangup = true;
  };
  ASSIGN_OR_RETURN(const auto shutdown,
                   ops::ShutdownSignal::Create(options.stop_on_eof,
                                               OnHangup(options.cluster.logging(), on_hangup)));
  RETURN_IF_ERROR(ops::SetUpLogging(options.cluster.logging(), "up"));
  RETURN_IF_ERROR(CheckAllAddresses(options));
  RETURN_IF_ERROR(CheckStorage(options.cluster));
  const absl::Status fit =
      FitLogsToShards(options.cluster, [&] { return shutdown->WaitFor(absl::ZeroDuration()); });
  if (!fit.ok()) return absl::IsCancelled(fit) ? absl::OkStatus() : fit;
  ASSIGN_OR_RETURN(const TempDir directory, TempDir::Create());

  ProcessCluster cluster(options, *shutdown, &hangup, directory.path());
  absl::Status status = cluster.Start();
  if (status.ok()) {
    PrintReady(cluster.info());
    const std::unique_ptr<PeriodicTask> remover = RemoveOldLogsLater(options, cluster.info());
    status = cluster.Run();
    status.Update(cluster.CheckCanSave());
  }
  if (absl::IsCancelled(status)) status = absl::OkStatus();  // stopped while starting: as asked
  status.Update(cluster.Stop());
  if (status.ok()) ops::Log(ops::LogLevel::kInfo, "stopped");
  return status;
}

}  // namespace emberd::launcher
