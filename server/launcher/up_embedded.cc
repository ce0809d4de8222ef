#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/coordinator/coordinator_server.h"
#include "server/launcher/pages.h"
#include "server/launcher/serve.h"
#include "server/launcher/up.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"
#include "server/shard/local_shard.h"

namespace emberd::launcher {

absl::Status UpEmbedded(const UpOptions& options) {
  const v1::ClusterConfig& cluster = options.cluster;
  auto shutdown = ops::ShutdownSignal::Create();
  if (!shutdown.ok()) return shutdown.status();
  absl::Status status = ops::SetUpLogging(cluster.logging(), "up");
  if (!status.ok()) return status;
  if (cluster.coordinators_size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("coordinators: ", cluster.coordinators_size(),
                                                   " are not allowed in one process; 1, or use "
                                                   "--processes"));
  }
  const v1::CoordinatorConfig& coordinator = cluster.coordinators(0);
  status = CheckAddresses("coordinators[0]", coordinator.address(), coordinator.http_address(),
                          cluster.security(), options.insecure);
  if (!status.ok()) return status;

  ops::Metrics metrics("up");
  const auto security = security::Security::Create(cluster.security(), &metrics);
  if (!security.ok()) return security.status();
  std::atomic<bool> ending = false;
  std::vector<std::shared_ptr<server::ShardBackend>> shards;
  for (int i = 0; i < cluster.shards_size(); ++i) {
    auto shard = server::MakeLocalShard(cluster, i, &metrics);
    if (!shard.ok()) return shard.status();
    shards.push_back(*std::move(shard));
  }
  auto server = server::CoordinatorServer::Start({.cluster = cluster,
                                                  .coordinator_index = 0,
                                                  .shards = std::move(shards),
                                                  .metrics = &metrics,
                                                  .security = *security});
  if (!server.ok()) return server.status();
  auto http = StartHttp(
      coordinator.http_address(),
      CoordinatorPages("up", server->get(), metrics, [&ending] { return !ending; }), **security);
  if (!http.ok()) return http.status();
  ClusterInfo info;
  info.shard_count = cluster.shards_size();
  info.sparsecores_per_shard = cluster.sparsecores_per_shard();
  info.https = cluster.security().has_tls();
  info.coordinators.push_back({.grpc = (*server)->address(),
                               .http = *http == nullptr ? "" : (*http)->address(),
                               .pid = getpid()});
  ops::Log(ops::LogLevel::kInfo, "serving",
           {{"grpc", info.coordinators[0].grpc}, {"http", info.coordinators[0].http}});
  PrintReady(info, cluster.logging());

  (*shutdown)->Wait();
  ending = true;
  const absl::Duration drain = absl::Milliseconds(cluster.timeouts().drain_ms());
  ops::ExitDeadline deadline(drain + absl::Seconds(kDrainMarginSeconds));
  (*server)->Drain(drain);
  http->reset();
  server->reset();
  ops::Log(ops::LogLevel::kInfo, "stopped");
  return absl::OkStatus();
}

}  // namespace emberd::launcher
