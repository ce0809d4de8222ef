#include "server/coordinator/train/group_drop.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator/train/group_opening.h"
#include "server/group/collective_router.h"
#include "server/group/group_rules.h"

namespace emberd::server {
namespace {

// One call of DropGroup.
class Dropping {
 public:
  Dropping(const ServedModel& model, const std::string& group, Fanout* fanout,
           rpc::CallContext* context)
      : model_(model),
        group_(group),
        fanout_(fanout),
        context_(context),
        host_(HostOf({model.id, group}, fanout->shards())) {}

  absl::StatusOr<bool> Run() {
    // Nothing is begun while somebody is at work, or a shard is not there.
    RETURN_IF_ERROR(DropOn(host_, {absl::StrCat(group_, "#")}));
    ASSIGN_OR_RETURN(const std::set<std::string> undecided, FindUndecided());
    for (const std::string& name : undecided) RETURN_IF_ERROR(Settle(name));
    // The host first, which may refuse.
    RETURN_IF_ERROR(DropOn(host_, names_));
    for (int shard = 0; shard < fanout_->shards(); ++shard) {
      if (shard != host_) RETURN_IF_ERROR(DropOn(shard, names_));
    }
    return dropped_;
  }

 private:
  internal::v1::OpenGroupRequest OpenRequest(const std::string& name) const {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(model_.id);
    request.set_history(model_.history);
    request.set_group(name);
    return request;
  }

  // Fills names_. The groups of which a shard holds a whole step that another may have made.
  absl::StatusOr<std::set<std::string>> FindUndecided() {
    internal::v1::OpenGroupRequest request = OpenRequest(absl::StrCat(group_, "#0"));
    request.set_ranks(kMaxGroupSize);
    ASSIGN_OR_RETURN(const auto shards, fanout_->OpenGroup(request, context_));
    std::set<std::string> names = {group_};  // of a SYNC group
    for (const auto& shard : shards) {
      for (const auto& rank : shard.ranks()) names.insert(absl::StrCat(group_, "#", rank.rank()));
    }
    std::set<std::string> undecided;
    for (const std::string& name : names) {
      ASSIGN_OR_RETURN(const auto known, fanout_->OpenGroup(OpenRequest(name), context_));
      const bool whole = std::any_of(known.begin(), known.end(),
                                     [](const auto& shard) { return shard.staged_step() >= 0; });
      if (whole) undecided.insert(name);
    }
    names_.assign(names.begin(), names.end());
    return undecided;
  }

  // In a generation of its own: from now on no word comes from the ranks that were. What is still
  // held then was made nowhere.
  absl::Status Settle(const std::string& name) {
    internal::v1::OpenGroupRequest request = OpenRequest(name);
    request.set_size(1);
    ASSIGN_OR_RETURN(const OpenedGroup opened, OpenGroup(fanout_, request, context_));
    ASSIGN_OR_RETURN(const auto shards, fanout_->OpenGroup(OpenRequest(name), context_));
    for (int shard = 0; shard < fanout_->shards(); ++shard) {
      if (shards[shard].staged_step() < 0) continue;
      internal::v1::DecideStepRequest decision;
      decision.set_model_id(model_.id);
      decision.set_history(model_.history);
      decision.set_group(name);
      decision.set_generation(opened.generation);
      decision.set_step(shards[shard].staged_step());
      RETURN_IF_ERROR(fanout_->DecideStep(shard, decision, context_).status());
    }
    return absl::OkStatus();
  }

  absl::Status DropOn(int shard, const std::vector<std::string>& names) {
    internal::v1::DropGroupsRequest request;
    request.set_model_id(model_.id);
    request.set_history(model_.history);
    request.mutable_groups()->Add(names.begin(), names.end());
    ASSIGN_OR_RETURN(const auto response, fanout_->DropGroups(shard, request, context_));
    dropped_ = dropped_ || response.dropped_size() > 0;
    return absl::OkStatus();
  }

  const ServedModel& model_;
  const std::string& group_;
  Fanout* const fanout_;
  rpc::CallContext* const context_;
  const int host_;
  std::vector<std::string> names_;  // as the shards have them
  bool dropped_ = false;
};

}  // namespace

absl::StatusOr<v1::DropGroupResponse> DropGroup(const ServedModel& model, const std::string& group,
                                                Fanout* fanout, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckGroupName("group", group));
  v1::DropGroupResponse response;
  ASSIGN_OR_RETURN(const bool dropped, Dropping(model, group, fanout, context).Run());
  response.set_dropped(dropped);
  return response;
}

}  // namespace emberd::server
