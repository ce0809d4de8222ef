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
  bool silent = false;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const bool vacant, rendezvous->Forget({request.model_id(), name}));
    silent = silent || !vacant;
  }
  // ASYNC ranks have nothing to say to the host, but bring their parts.
  return host->DropGroups(request, silent ? GroupSteps::Quiet::kForLong : GroupSteps::Quiet::kNow);
}

}  // namespace emberd::server
