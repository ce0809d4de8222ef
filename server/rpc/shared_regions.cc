#include "server/rpc/shared_regions.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/logging.h"

namespace emberd::rpc {

namespace {

std::unique_ptr<RegionServer> Start(const v1::ClusterConfig& cluster, const char* peers,
                                    RegionServer::Options options) {
  if (cluster.transport() == v1::ClusterConfig::TCP) return nullptr;
  options.max_bytes = cluster.budgets().shared_memory_bytes();
  auto server = RegionServer::Start(std::move(options));
  if (server.ok()) return *std::move(server);
  ops::Log(ops::LogLevel::kWarning, absl::StrCat("no memory is shared with ", peers),
           {{"reason", std::string(server.status().message())}});
  return nullptr;
}

}  // namespace

std::unique_ptr<RegionServer> StartClientRegions(const v1::ClusterConfig& cluster) {
  return Start(cluster, "clients", {.name = "emberd", .any_user = cluster.share_with_any_user()});
}

std::unique_ptr<RegionServer> StartShardRegions(const v1::ClusterConfig& cluster) {
  return Start(cluster, "coordinators", {.name = "emberd-shard", .max_lent_by_peer = 256});
}

absl::StatusOr<v1::ShareMemoryResponse> InvitePeer(RegionServer* regions) {
  if (regions == nullptr) return absl::UnimplementedError("this process shares no memory");
  RegionServer::Invitation invitation = regions->Invite();
  v1::ShareMemoryResponse response;
  response.set_socket(std::move(invitation.socket));
  response.set_ticket(std::move(invitation.ticket));
  return response;
}

}  // namespace emberd::rpc
