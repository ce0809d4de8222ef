#include "server/launcher/serve.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <utility>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/coordinator/coordinator_server.h"
#include "server/launcher/pages.h"
#include "server/ops/bind_rule.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"
#include "server/shard/shard_server.h"

namespace emberd::launcher {
namespace {

using ops::Log;
using ops::LogLevel;

// Tells whoever waits for this process: by the ready file if there is one, else by a line on
// standard output.
absl::Status Announce(const std::string& name, const ReadyInfo& info,
                      const std::string& ready_file) {
  Log(LogLevel::kInfo, "serving", {{"grpc", info.grpc}, {"http", info.http}});
  if (!ready_file.empty()) return WriteReadyFile(ready_file, info);
  std::printf("emberd: ready %s grpc=%s http=%s pid=%d\n", name.c_str(), info.grpc.c_str(),
              info.http.c_str(), info.pid);
  std::fflush(stdout);
  return absl::OkStatus();
}

// `Server` is a ShardServer or a CoordinatorServer, `Process` the part of the cluster that is about
// it, `start` makes the server, and `pages` what its web server serves.
template <typename Process, typename Start, typename Pages>
absl::Status Serve(const ServeOptions& options, const std::string& role, const Process& process,
                   Start start, Pages pages) {
  auto shutdown = ops::ShutdownSignal::Create();
  if (!shutdown.ok()) return shutdown.status();
  const std::string name = absl::StrCat(role, "-", options.index);
  absl::Status status = ops::SetUpLogging(options.cluster.logging(), name);
  if (!status.ok()) return status;
  status = CheckAddresses(absl::StrCat(role, "s[", options.index, "]"), process.address(),
                          process.http_address(), options.cluster.security(), options.insecure);
  if (!status.ok()) return status;
  ops::Metrics metrics(role);
  const auto security = security::Security::Create(options.cluster.security(), &metrics);
  if (!security.ok()) return security.status();
  Log(LogLevel::kInfo, "starting", {{"version", EMBERD_VERSION}, {"pid", getpid()}});

  std::atomic<bool> ending = false;
  auto server = start(&metrics, *security);
  if (!server.ok()) return server.status();
  auto http =
      StartHttp(process.http_address(),
                pages(name, server->get(), metrics, [&ending] { return !ending; }), **security);
  if (!http.ok()) return http.status();
  status = Announce(name,
                    {.grpc = (*server)->address(),
                     .http = *http == nullptr ? "" : (*http)->address(),
                     .pid = getpid()},
                    options.ready_file);
  if (!status.ok()) return status;

  (*shutdown)->Wait();
  ending = true;
  const absl::Duration drain = absl::Milliseconds(options.cluster.timeouts().drain_ms());
  ops::ExitDeadline deadline(drain + absl::Seconds(kDrainMarginSeconds));
  (*server)->Drain(drain);
  http->reset();
  server->reset();
  Log(LogLevel::kInfo, "stopped");
  return absl::OkStatus();
}

}  // namespace

absl::Status ServeShard(const ServeOptions& options) {
  const auto start = [&](ops::Metrics* metrics, auto security) {
    return server::ShardServer::Start({.cluster = options.cluster,
                                       .shard_index = options.index,
                                       .metrics = metrics,
                                       .security = std::move(security)});
  };
  const auto pages = [](const std::string& name, server::ShardServer*, const ops::Metrics& metrics,
                        std::function<bool()> serving) {
    return ShardPages(name, metrics, std::move(serving));
  };
  return Serve(options, "shard", options.cluster.shards(options.index), start, pages);
}

absl::Status ServeCoordinator(const ServeOptions& options) {
  const auto start = [&](ops::Metrics* metrics, auto security) {
    return server::CoordinatorServer::Start({.cluster = options.cluster,
                                             .coordinator_index = options.index,
                                             .shards = {},
                                             .metrics = metrics,
                                             .security = std::move(security)});
  };
  return Serve(options, "coordinator", options.cluster.coordinators(options.index), start,
               &CoordinatorPages);
}

absl::Status CheckAddresses(const std::string& path, const std::string& address,
                            const std::string& http_address, const v1::SecurityConfig& security,
                            bool insecure) {
  const ops::Protection protection = ops::ProtectionOf(security);
  bool exposed = false;
  for (const bool http : {false, true}) {
    const std::string& checked = http ? http_address : address;
    if (checked.empty()) continue;
    const std::string field = path + (http ? ".http_address" : ".address");
    const absl::Status status = ops::CheckBindAllowed(field, checked, protection, insecure);
    if (!status.ok()) return status;
    exposed |= !ops::CheckBindAllowed(field, checked, protection, /*insecure=*/false).ok();
  }
  if (exposed) {
    Log(LogLevel::kWarning,
        protection == ops::Protection::kNone ? "insecure: plain text, open to the network"
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

}  // namespace emberd::launcher
