#include "server/launcher/serve.h"

#include <atomic>
#include <cstdio>
#include <utility>

#include <unistd.h>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/coordinator.h"
#include "server/host/shard_server.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"
#include "server/status_page/status_page.h"

namespace emberd::launcher {
namespace {

using ops::Log;
using ops::LogLevel;

// How long a page waits for shards that do not answer.
constexpr absl::Duration kPatience = absl::Seconds(3);

// Tells whoever waits for this process: by the ready file if there is one, else by a line on
// standard output.
absl::Status Announce(const std::string& name, const ReadyInfo& info, const std::string& ready_file,
                      const absl::Status& ready) {
  if (ready.ok()) {
    Log(LogLevel::kInfo, "serving", {{"grpc", info.grpc}, {"http", info.http}});
  } else {
    Log(LogLevel::kInfo, "listening, but not serving yet",
        {{"grpc", info.grpc}, {"http", info.http}, {"reason", ready.message()}});
  }
  if (!ready_file.empty()) return WriteReadyFile(ready_file, info);
  std::printf("emberd: ready %s grpc=%s http=%s pid=%d\n", name.c_str(), info.grpc.c_str(),
              info.http.c_str(), info.pid);
  std::fflush(stdout);
  return absl::OkStatus();
}

// What SIGHUP does: the log and the spans go on in new files, and what is set is woken.
// Thread-safe.
class Hangup {
 public:
  void Call() {
    ops::ReopenLog();
    rpc::ReopenSpans();
    absl::MutexLock lock(&mutex_);
    if (watch_ != nullptr) watch_->ReloadSoon();
  }
  // Null: nothing.
  void Set(security::CredentialsWatch* watch) {
    absl::MutexLock lock(&mutex_);
    watch_ = watch;
  }

 private:
  absl::Mutex mutex_;
  security::CredentialsWatch* watch_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

// A shard has nothing to save at its end.
absl::Status Drain(absl::Duration limit, host::ShardServer* shard) {
  shard->Drain(limit);
  return absl::OkStatus();
}
absl::Status Drain(absl::Duration limit, coordinator::CoordinatorServer* coordinator) {
  return coordinator->Drain(limit);
}

// `Server` is a ShardServer or a CoordinatorServer, `Process` the part of the cluster that is about
// it, `start` makes the server, `ready` says whether it serves already, and `pages` is what its web
// server serves.
template <typename Process, typename Start, typename Ready, typename Pages>
absl::Status Serve(const ServeOptions& options, const std::string& role, const Process& process,
                   int cpu_threads, Start start, Ready ready, Pages pages) {
  Hangup hangup;
  ASSIGN_OR_RETURN(const auto shutdown,
                   ops::ShutdownSignal::Create(false, [&hangup] { hangup.Call(); }));
  const std::string name = absl::StrCat(role, "-", options.index);
  const v1::ClusterConfig& cluster = options.cluster;
  RETURN_IF_ERROR(ops::SetUpLogging(cluster.logging(), name));
  RETURN_IF_ERROR(rpc::SetUpSpans(cluster.logging().span_file(), name));
  RETURN_IF_ERROR(CheckAddresses(absl::StrCat(role, "s[", options.index, "]"), process.address(),
                                 process.http_address(), cluster.security(), options.insecure));
  ops::Metrics metrics(role);
  ASSIGN_OR_RETURN(const auto security, security::Security::Create(cluster.security(), &metrics));
  Log(LogLevel::kInfo, "starting", {{"version", EMBERD_VERSION}, {"pid", getpid()}});

  ThreadPools threads(cpu_threads);  // after `shutdown`, whose signals no thread may take
  std::atomic<bool> ending = false;
  ASSIGN_OR_RETURN(auto server, start(&metrics, &threads, security));
  const auto serving = [&ending] { return !ending; };
  ASSIGN_OR_RETURN(auto http,
                   StartHttp(process.http_address(),
                             pages(name, *security, server.get(), metrics, serving), *security));
  auto watch = WatchCredentials(security.get(), http.get());
  hangup.Set(watch.get());
  const absl::Cleanup forget = [&hangup] { hangup.Set(nullptr); };
  RETURN_IF_ERROR(Announce(
      name,
      {.grpc = server->address(), .http = http == nullptr ? "" : http->address(), .pid = getpid()},
      options.ready_file, ready(*server)));
  return DrainOnSignal(*shutdown, cluster.timeouts(), [&](absl::Duration limit) {
    ending = true;
    absl::Status drained = Drain(limit, server.get());
    hangup.Set(nullptr);
    watch.reset();
    http.reset();
    server.reset();
    return drained;
  });
}

}  // namespace

absl::Status ServeShard(const ServeOptions& options) {
  RETURN_IF_ERROR(CheckStorage(options.cluster, options.index));
  const auto start = [&](ops::Metrics* metrics, ThreadPools* threads, auto security) {
    return host::ShardServer::Start({.cluster = options.cluster,
                                     .shard_index = options.index,
                                     .metrics = metrics,
                                     .threads = threads,
                                     .security = std::move(security)});
  };
  const auto pages = [](const std::string& name, const security::Security&,
                        host::ShardServer* shard, const ops::Metrics& metrics,
                        std::function<bool()> serving) -> std::vector<ops::HttpRoute> {
    const auto serves = [shard, serving = std::move(serving)] {
      return serving() && shard->CheckReady().ok();
    };
    return {ops::MetricsRoute(metrics), ops::HealthRoute(serves),
            ops::IndexRoute(name, {"/metrics", "/healthz"})};
  };
  return Serve(
      options, "shard", options.cluster.shards(options.index), options.cluster.shard_threads(),
      start, [](const host::ShardServer& shard) { return shard.CheckReady(); }, pages);
}

absl::Status ServeCoordinator(const ServeOptions& options) {
  const auto start = [&](ops::Metrics* metrics, ThreadPools* threads, auto security) {
    return coordinator::CoordinatorServer::Start({.cluster = options.cluster,
                                                  .coordinator_index = options.index,
                                                  .shards = {},
                                                  .metrics = metrics,
                                                  .threads = threads,
                                                  .security = std::move(security)});
  };
  const auto pages = [&](const std::string& name, const security::Security& security,
                         coordinator::CoordinatorServer* coordinator, const ops::Metrics& metrics,
                         std::function<bool()> serving) {
    return CoordinatorPages(name, options.index, options.cluster, security, coordinator, metrics,
                            std::move(serving));
  };
  return Serve(
      options, "coordinator", options.cluster.coordinators(options.index),
      options.cluster.coordinator_threads(), start,
      [](const coordinator::CoordinatorServer&) { return absl::OkStatus(); }, pages);
}

absl::Status DrainOnSignal(const ops::ShutdownSignal& shutdown, const v1::TimeoutConfig& timeouts,
                           const std::function<absl::Status(absl::Duration)>& end) {
  shutdown.Wait();
  const absl::Duration limit = absl::Milliseconds(timeouts.drain_ms());
  const ops::ExitDeadline deadline(limit + absl::Seconds(kDrainMarginSeconds));
  const absl::Status ended = end(limit);
  Log(LogLevel::kInfo, "stopped");
  return ended;
}

absl::Status CheckAddresses(const std::string& path, const std::string& address,
                            const std::string& http_address, const v1::SecurityConfig& security,
                            bool insecure) {
  const security::Protection protection = security::ProtectionOf(security);
  bool exposed = false;
  for (const bool http : {false, true}) {
    const std::string& checked = http ? http_address : address;
    if (checked.empty()) continue;
    const std::string field = path + (http ? ".http_address" : ".address");
    RETURN_IF_ERROR(security::CheckBindAllowed(field, checked, protection, insecure));
    exposed |= !security::CheckBindAllowed(field, checked, protection, /*insecure=*/false).ok();
  }
  if (exposed) {
    Log(LogLevel::kWarning,
        protection == security::Protection::kNone ? "insecure: plain text, open to the network"
                                                  : "insecure: encrypted, but open to the network",
        {{"grpc", address}, {"http", http_address}});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ops::HttpServer>> StartHttp(const std::string& address,
                                                           std::vector<ops::HttpRoute> routes,
                                                           const security::Security& security) {
  if (address.empty()) return nullptr;
  ops::HttpOptions options = {.address = address, .routes = std::move(routes)};
  security.Protect(&options);
  return ops::HttpServer::Start(std::move(options));
}

std::unique_ptr<security::CredentialsWatch> WatchCredentials(security::Security* security,
                                                             ops::HttpServer* http) {
  const auto renew = [security, http] {
    ops::HttpOptions options;
    security->Protect(&options);
    if (http == nullptr || !options.tls.has_value()) return;
    const absl::Status status = http->Renew(*std::move(options.tls));
    if (!status.ok()) Log(LogLevel::kError, "http", {{"error", status.message()}});
  };
  return std::make_unique<security::CredentialsWatch>(security, renew);
}

std::vector<ops::HttpRoute> CoordinatorPages(const std::string& name, int index,
                                             const v1::ClusterConfig& cluster,
                                             const security::Security& security,
                                             coordinator::CoordinatorServer* coordinator,
                                             const ops::Metrics& metrics,
                                             std::function<bool()> serving) {
  const auto stats = [coordinator](const v1::GetStatsRequest& request) {
    rpc::CallContext context(SteadyNow() + kPatience);
    return coordinator->administration()->GetStats(request, &context);
  };
  const auto model = [coordinator](const v1::DescribeModelRequest& request) {
    rpc::CallContext context(SteadyNow() + kPatience);
    return coordinator->coordinator()->DescribeModel(request, &context);
  };
  status_page::Source source = {.name = name,
                                .address = coordinator->address(),
                                .http_address = cluster.coordinators(index).http_address(),
                                .stats = stats,
                                .model = model};
  if (cluster.coordinators_size() > 1) {
    const auto peers = std::make_shared<const status_page::Peers>(cluster, index, security);
    source.others = [peers] { return peers->Ask(); };
  }
  std::vector<ops::HttpRoute> routes = status_page::Routes(source);
  routes.push_back(ops::MetricsRoute(metrics));
  routes.push_back(ops::HealthRoute([coordinator, serving = std::move(serving)] {
    return serving() && !coordinator->administration()->draining();
  }));
  return routes;
}

}  // namespace emberd::launcher
