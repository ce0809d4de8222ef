#include "server/coordinator/train/group_drop.h"

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
    ASSIGN_OR_RETURN(const std::vector<std::string> names, FindNames());
    for (const std::string& name : names) RETURN_IF_ERROR(Settle(name));
    // The host first, which may refuse.
    RETURN_IF_ERROR(DropOn(host_, names));
    for (int shard = 0; shard < fanout_->shards(); ++shard) {
      if (shard != host_) RETURN_IF_ERROR(DropOn(shard, names));
    }
    return !names.empty();
  }

 private:
  internal::v1::OpenGroupRequest OpenRequest(const std::string& name) const {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(model_.id);
    request.set_history(model_.history);
    request.set_group(name);
    return request;
  }

  // As the shards have them: those that any of them knows.
  absl::StatusOr<std::vector<std::string>> FindNames() {
    internal::v1::OpenGroupRequest request = OpenRequest(absl::StrCat(group_, "#0"));
    request.set_ranks(kMaxGroupSize);
    ASSIGN_OR_RETURN(const auto shards, fanout_->OpenGroup(request, context_));
    std::set<std::string> names;
    for (const auto& shard : shards) {
      for (const auto& rank : shard.ranks()) names.insert(absl::StrCat(group_, "#", rank.rank()));
    }
    ASSIGN_OR_RETURN(const auto sync, fanout_->OpenGroup(OpenRequest(group_), context_));
    for (const auto& shard : sync) {
      if (shard.here()) names.insert(group_);
    }
    return std::vector<std::string>(names.begin(), names.end());
  }

  // In a generation of its own: from now on neither parts nor words come from the ranks that were,
  // though their coordinators may have sent some. What is still held then was made nowhere.
  absl::Status Settle(const std::string& name) {
    internal::v1::OpenGroupRequest request = OpenRequest(name);
    request.set_size(1);
    ASSIGN_OR_RETURN(const OpenedGroup opened, OpenGroup(fanout_, request, context_));
    ASSIGN_OR_RETURN(const auto shards, fanout_->OpenGroup(OpenRequest(name), context_));
    internal::v1::DecideStepRequest decision;
    decision.set_model_id(model_.id);
    decision.set_history(model_.history);
    decision.set_group(name);
    decision.set_generation(opened.generation);
    for (int shard = 0; shard < fanout_->shards(); ++shard) {
      if (shards[shard].staged_step() >= 0) {
        decision.set_step(shards[shard].staged_step());
        decision.set_commit(false);
        RETURN_IF_ERROR(fanout_->DecideStep(shard, decision, context_).status());
      }
      if (!shards[shard].known()) continue;
      // It is made, but may be on its way to the rows.
      decision.set_step(shards[shard].next_step() - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(fanout_->DecideStep(shard, decision, context_).status());
    }
    return absl::OkStatus();
  }

  absl::Status DropOn(int shard, const std::vector<std::string>& names) {
    internal::v1::DropGroupsRequest request;
    request.set_model_id(model_.id);
    request.set_history(model_.history);
    request.mutable_groups()->Add(names.begin(), names.end());
    return fanout_->DropGroups(shard, request, context_).status();
  }

  const ServedModel& model_;
  const std::string& group_;
  Fanout* const fanout_;
  rpc::CallContext* const context_;
  const int host_;
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
