// Whether a coordinator and a shard mean the same cluster. Rows lie where the order of the shards
// and their SparseCores put them, so a coordinator with another description would read, and
// overwrite, wrong rows. Every call to a shard therefore says which place its caller takes the
// shard to have (ShardPlace in shard_service.proto), and the shard refuses what differs.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/logging.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::rpc {

// The metadata that carries a serialized ShardPlace.
inline constexpr char kShardPlaceKey[] = "emberd-shard-place-bin";

// Where `cluster`, which is complete, puts its shard `shard`.
internal::v1::ShardPlace PlaceOf(const v1::ClusterConfig& cluster, int shard);

// Thread-safe. Logs what it refuses, once a minute.
class ShardPlaceCheck {
 public:
  // For the process that is shard `shard` of `cluster`.
  ShardPlaceCheck(const v1::ClusterConfig& cluster, int shard);

  // FAILED_PRECONDITION names the first difference, also for a call that does not say its place.
  absl::Status Check(const grpc::ServerContextBase& context) const;
  // The same for what the metadata holds.
  absl::Status CheckPlace(const std::string& serialized) const;

 private:
  std::string FirstDifference(const internal::v1::ShardPlace& theirs) const;

  const internal::v1::ShardPlace place_;
  const std::string serialized_;
  const std::vector<std::string> addresses_;
  mutable ops::KeyedLog refusals_{absl::Minutes(1)};
};

}  // namespace emberd::rpc
