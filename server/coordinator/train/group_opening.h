// Beginning a group anew on the shards, for its ranks or for who drops it, and dropping it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "server/coordinator/served_model.h"
#include "server/coordinator/shard_set.h"
#include "server/group/collective.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

struct OpenedGroup {
  uint64_t generation = 0;  // nobody else's: see group_generation.h
  uint64_t opener = 0;
  int64_t next_step = -1;        // all before it have been made on all shards; -1: none has been
  uint64_t made_generation = 0;  // of the newest of them; 0: not known
  std::vector<internal::v1::RankProgress>
      ranks;            // those that some shard knows, if the request asks for them
  absl::Status agreed;  // FAILED_PRECONDITION: shards cannot be brought together
};

// `request` has everything but generation and opener. A step that some shard has applied while
// others only hold its parts is finished first. ABORTED: others begin the group at the same time,
// again and again.
absl::StatusOr<OpenedGroup> OpenGroup(const ShardSet& shards,
                                      internal::v1::OpenGroupRequest request,
                                      rpc::CallContext* context);

// See AdminService.DropGroup. A step that was left half done is finished, or given up, first.
absl::StatusOr<v1::DropGroupResponse> DropGroup(const ServedModel& model, const std::string& group,
                                                const ShardSet& shards, rpc::CallContext* context);

}  // namespace emberd::server
