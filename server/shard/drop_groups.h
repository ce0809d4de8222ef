// Forgetting groups on a shard that may be the host where their ranks meet.
#pragma once

#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/group/rendezvous.h"
#include "server/shard/shard_host.h"

namespace emberd::server {

// See DropGroups in shard_service.proto. FAILED_PRECONDITION, and nothing is forgotten, also where
// ranks are at work in one of the groups, as far as `rendezvous` knows. "NAME#" is no group: it
// asks for nothing but this of NAME.
absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
    ShardHost* host, Rendezvous* rendezvous, const internal::v1::DropGroupsRequest& request);

}  // namespace emberd::server
