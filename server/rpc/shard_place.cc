#include "server/rpc/shard_place.h"

#include <algorithm>
#include <cstdint>

#include <grpcpp/server_context.h>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "config/address.h"

namespace emberd::rpc {
namespace {

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
