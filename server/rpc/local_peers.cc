#include "server/rpc/local_peers.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <grpc/grpc_security_constants.h>
#include <grpcpp/server_context.h>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "server/security/security.h"

namespace emberd::rpc {
namespace {

// Of sockets and files, for people.
std::string NameOf(LocalPeers peers) {
  return peers == LocalPeers::kClients ? "emberd" : "emberd-shard";
}

constexpr uint32_t kUnknown = 0;

// An address of which others know nothing, because the system picks the port or each machine has
// its own, is kUnknown.
uint32_t AddressDigest(const std::string& text) {
  const absl::StatusOr<config::Address> address = config::ParseAddress(text);
  if (!address.ok() || address->port == 0 || address->is_wildcard()) return kUnknown;
  return std::max<uint32_t>(static_cast<uint32_t>(Sha256Prefix(address->ToString())), 1);
}

std::vector<std::string> AddressesOf(const v1::ClusterConfig& cluster) {
  std::vector<std::string> addresses;
  for (const v1::ShardConfig& shard : cluster.shards()) addresses.push_back(shard.address());
  return addresses;
}

}  // namespace

std::unique_ptr<RegionServer> MakeRegions(const v1::ClusterConfig& cluster, LocalPeers peers) {
  if (cluster.transport() == v1::ClusterConfig::TCP) return nullptr;
  RegionServer::Options options{.name = NameOf(peers)};
  options.max_bytes = cluster.budgets().shared_memory_bytes();
  if (peers == LocalPeers::kCoordinators) options.max_lent_by_peer = 256;
  return std::make_unique<RegionServer>(std::move(options));
}

std::unique_ptr<LocalServer> ServeLocally(const v1::ClusterConfig& cluster, LocalPeers peers,
                                          RegionServer* regions, LaneServer* lanes) {
  if (cluster.transport() == v1::ClusterConfig::TCP) return nullptr;
  const bool clients = peers == LocalPeers::kClients;
  LocalServer::Options options{.name = NameOf(peers)};
  options.any_user = clients && cluster.share_with_any_user();
  auto server = LocalServer::Start(std::move(options), regions, lanes);
  if (server.ok()) return *std::move(server);
  ops::Log(ops::LogLevel::kWarning,
           absl::StrCat("no memory is shared with ", clients ? "clients" : "coordinators",
                        ", and all their calls go by gRPC"),
           {{"reason", std::string(server.status().message())}});
  return nullptr;
}

LocalPeer LocalPeerOf(const grpc::ServerContextBase& context) {
  LocalPeer peer{.address = security::PeerAddress(context.peer()), .certificate = {}, .agent = {}};
  const auto agent = context.client_metadata().find("user-agent");
  if (agent != context.client_metadata().end()) {
    peer.agent = std::string(agent->second.data(), agent->second.size());
  }
  const auto connection = context.auth_context();
  if (connection == nullptr) return peer;
  const auto names = connection->FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME);
  if (!names.empty()) peer.certificate = std::string(names.front().data(), names.front().size());
  return peer;
}

absl::StatusOr<v1::ShareMemoryResponse> InvitePeer(LocalServer* server, LocalPeer peer) {
  if (server == nullptr) return absl::UnimplementedError("this process shares no memory");
  LocalInvitation invitation = server->Invite(std::move(peer));
  v1::ShareMemoryResponse response;
  response.set_socket(std::move(invitation.socket));
  response.set_ticket(std::move(invitation.ticket));
  return response;
}

LaneServer::Handler ServeOnLanes(v1::LaneMethod number, absl::string_view method,
                                 const security::Security* security, LaneServer::Handler handler) {
  return [=](LaneCall* call) -> LaneAnswer {
    const lanes::Request& request = call->request();
    if (request.method != static_cast<uint32_t>(number)) {
      return {.status = absl::UnimplementedError(
                  absl::StrCat("no call of number ", request.method, " is made on lanes"))};
    }
    if (security == nullptr) return handler(call);
    security::CallHeaders headers{.method = method,
                                  .authorization = {},
                                  .agent = call->peer().agent,
                                  .certificate = call->peer().certificate};
    if (!request.authorization.empty()) headers.authorization.push_back(request.authorization);
    absl::Status refused = security->CheckCall(headers);
    return refused.ok() ? handler(call) : LaneAnswer{.status = std::move(refused)};
  };
}

absl::Time DeadlineOf(const LaneCall& call, absl::Duration default_patience) {
  const absl::Duration patience = call.request().patience;
  return SteadyNow() + (patience == absl::InfiniteDuration() ? default_patience : patience);
}

internal::v1::ShardPlace PlaceOf(const v1::ClusterConfig& cluster, int shard) {
  internal::v1::ShardPlace place;
  place.set_shard(shard);
  place.set_shards(cluster.shards_size());
  place.set_sparsecores_per_shard(cluster.sparsecores_per_shard());
  for (int i = 0; i < cluster.shards_size(); ++i) {
    // A process may listen elsewhere than where others find it. That it was found says enough.
    place.add_others(i == shard ? kUnknown : AddressDigest(cluster.shards(i).address()));
  }
  return place;
}

ShardPlaceCheck::ShardPlaceCheck(const v1::ClusterConfig& cluster, int shard)
    : place_(PlaceOf(cluster, shard)),
      serialized_(place_.SerializeAsString()),
      addresses_(AddressesOf(cluster)) {}

absl::Status ShardPlaceCheck::Check(const grpc::ServerContextBase& context) const {
  const auto found = context.client_metadata().find(kShardPlaceKey);
  const absl::Status status =
      CheckPlace(found == context.client_metadata().end()
                     ? ""
                     : std::string(found->second.data(), found->second.size()));
  if (!status.ok()) {
    const std::string reason(status.message());
    refusals_.Log(reason, ops::LogLevel::kWarning, "refused a coordinator", {{"reason", reason}});
  }
  return status;
}

absl::Status ShardPlaceCheck::CheckPlace(const std::string& serialized) const {
  if (serialized == serialized_) return absl::OkStatus();
  internal::v1::ShardPlace theirs;
  if (serialized.empty() || !theirs.ParseFromString(serialized)) {
    return absl::FailedPreconditionError(
        "the call does not name its shard and cluster; only coordinators of "
        "this version of emberd may call shards");
  }
  const std::string difference = FirstDifference(theirs);
  if (difference.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      difference, "; start every process of a cluster with the same cluster description"));
}

std::string ShardPlaceCheck::FirstDifference(const internal::v1::ShardPlace& theirs) const {
  if (theirs.sparsecores_per_shard() != place_.sparsecores_per_shard()) {
    return absl::StrCat("the coordinator counts ", theirs.sparsecores_per_shard(),
                        " SparseCores in a shard, but this process has ",
                        place_.sparsecores_per_shard());
  }
  if (theirs.shards() != place_.shards() || theirs.shard() != place_.shard()) {
    return absl::StrCat("the coordinator takes this process for shard ", theirs.shard(), " of ",
                        theirs.shards(), ", but it is shard ", place_.shard(), " of ",
                        place_.shards());
  }
  for (int i = 0; i < std::min(theirs.others_size(), place_.others_size()); ++i) {
    if (theirs.others(i) == kUnknown || place_.others(i) == kUnknown) continue;
    if (theirs.others(i) == place_.others(i)) continue;
    return absl::StrCat("shards[", i, "].address is \"", addresses_[i],
                        "\" in the cluster description of this process, but not in that of the "
                        "coordinator");
  }
  return "";
}

}  // namespace emberd::rpc
