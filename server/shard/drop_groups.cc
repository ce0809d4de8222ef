#include "server/shard/drop_groups.h"

#include <set>
#include <string>

#include "base/status.h"
#include "server/shard/group_steps.h"

namespace emberd::server {

absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
    ShardHost* host, Rendezvous* rendezvous, const internal::v1::DropGroupsRequest& request) {
  std::set<std::string> names;
  for (const std::string& group : request.groups()) names.insert(group.substr(0, group.find('#')));
  for (const std::string& name : names) {
    RETURN_IF_ERROR(rendezvous->Forget({request.model_id(), name}));
  }
  return host->DropGroups(request);
}

}  // namespace emberd::server
