#include "server/coordinator/train/group_opening.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "server/group/collective_router.h"
#include "server/group/group_rules.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

using internal::v1::OpenGroupRequest;
using internal::v1::OpenGroupResponse;

constexpr int kOpenAttempts = 5;
// Two who got into each other's way should not do so again.
constexpr absl::Duration kMostOpenPause = absl::Milliseconds(20);

using OpenAnswers = std::vector<OpenGroupResponse>;

// The next number, opened on all shards; `request` keeps it.
absl::StatusOr<OpenAnswers> TakeNumber(const ShardSet& shards, OpenGroupRequest* request,
                                       rpc::CallContext* context) {
  absl::BitGen random;
  for (int attempt = 1;; ++attempt) {
    request->set_generation(0);
    ASSIGN_OR_RETURN(const OpenAnswers asked,
                     shards.Ask(&ShardBackend::OpenGroup, *request, context));
    uint64_t newest = 0;
    for (const OpenGroupResponse& shard : asked) newest = std::max(newest, shard.generation());
    request->set_generation(newest + 1);
    request->set_opener(absl::Uniform<uint64_t>(random, 1, ~uint64_t{0}));
    absl::StatusOr<OpenAnswers> opened = shards.Ask(&ShardBackend::OpenGroup, *request, context);
    if (!absl::IsAborted(opened.status()) || attempt == kOpenAttempts) return opened;
    absl::SleepFor(absl::Uniform(random, 0.0, 1.0) * kMostOpenPause);
  }
}

// A step was decided if any shard has made it, and then all hold it or have made it.
// Fills in the step that all shards have reached then.
absl::Status FinishStep(const ShardSet& shards, const OpenGroupRequest& request,
                        const OpenAnswers& answers, rpc::CallContext* context,
                        OpenedGroup* opened) {
  for (const OpenGroupResponse& shard : answers) {
    if (!shard.known() || shard.next_step() < opened->next_step) continue;
    opened->next_step = shard.next_step();
    opened->made_generation = shard.made_generation();
  }
  const int64_t next = opened->next_step;
  if (next < 0) return absl::OkStatus();
  for (size_t i = 0; i < answers.size(); ++i) {
    const OpenGroupResponse& shard = answers[i];
    if (shard.known() && shard.next_step() == next) continue;
    if (shard.staged_step() == next - 1) {
      internal::v1::DecideStepRequest decision;
      decision.set_model_id(request.model_id());
      decision.set_history(request.history());
      decision.set_group(request.group());
      decision.set_generation(request.generation());
      decision.set_step(next - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(shards[i].DecideStep(decision, context).status());
      ops::Log(ops::LogLevel::kInfo, "finished a step that only some shards had applied",
               {{"group", request.group()}, {"step", next - 1}, {"shard", i}});
    } else if (shard.known()) {
      opened->agreed.Update(absl::FailedPreconditionError(
          absl::StrCat("group '", request.group(), "': shard ", i, " has applied the steps before ",
                       shard.next_step(), ", other shards those before ", next,
                       ", and the gradients of the missing step are gone")));
    } else {
      ops::Log(ops::LogLevel::kWarning, "a shard has lost the steps of a group",
               {{"group", request.group()}, {"shard", i}, {"next_step", next}});
    }
  }
  return absl::OkStatus();
}

// What the shards know together: one may have made a step that is on its way on another.
std::vector<internal::v1::RankProgress> MergeRanks(const OpenAnswers& shards) {
  std::map<int, internal::v1::RankProgress> ranks;
  for (const OpenGroupResponse& shard : shards) {
    for (const internal::v1::RankProgress& from : shard.ranks()) {
      internal::v1::RankProgress& to = ranks[from.rank()];
      to.set_rank(from.rank());
      to.set_next_step(std::max(to.next_step(), from.next_step()));
      to.set_finished(to.finished() || from.finished());
    }
  }
  std::vector<internal::v1::RankProgress> merged;
  for (const auto& [rank, progress] : ranks) merged.push_back(progress);
  return merged;
}

}  // namespace

absl::StatusOr<OpenedGroup> OpenGroup(const ShardSet& shards, OpenGroupRequest request,
                                      rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const OpenAnswers answers, TakeNumber(shards, &request, context));
  OpenedGroup opened;
  opened.generation = request.generation();
  opened.opener = request.opener();
  RETURN_IF_ERROR(FinishStep(shards, request, answers, context, &opened));
  opened.ranks = MergeRanks(answers);
  return opened;
}

// Forgetting a group of trainers whose run is over, on all shards.

namespace {

// One call of DropGroup.
class Dropping {
 public:
  Dropping(const ServedModel& model, const std::string& group, const ShardSet& shards,
           rpc::CallContext* context)
      : model_(model),
        group_(group),
        shards_(shards),
        context_(context),
        host_(HostOf({model.id, group}, static_cast<int>(shards.size()))) {}

  absl::StatusOr<bool> Run() {
    // Nothing is begun while somebody is at work, or a shard is not there.
    RETURN_IF_ERROR(DropOn(host_, {absl::StrCat(group_, "#")}));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, FindNames());
    for (const std::string& name : names) RETURN_IF_ERROR(Settle(name));
    // The host first, which may refuse.
    RETURN_IF_ERROR(DropOn(host_, names));
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
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
    ASSIGN_OR_RETURN(const auto answers, shards_.Ask(&ShardBackend::OpenGroup, request, context_));
    std::set<std::string> names;
    for (const auto& shard : answers) {
      for (const auto& rank : shard.ranks()) names.insert(absl::StrCat(group_, "#", rank.rank()));
    }
    ASSIGN_OR_RETURN(const auto sync,
                     shards_.Ask(&ShardBackend::OpenGroup, OpenRequest(group_), context_));
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
    ASSIGN_OR_RETURN(const OpenedGroup opened, OpenGroup(shards_, request, context_));
    ASSIGN_OR_RETURN(const auto answers,
                     shards_.Ask(&ShardBackend::OpenGroup, OpenRequest(name), context_));
    internal::v1::DecideStepRequest decision;
    decision.set_model_id(model_.id);
    decision.set_history(model_.history);
    decision.set_group(name);
    decision.set_generation(opened.generation);
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (answers[shard].staged_step() >= 0) {
        decision.set_step(answers[shard].staged_step());
        decision.set_commit(false);
        RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
      }
      if (!answers[shard].known()) continue;
      // It is made, but may be on its way to the rows.
      decision.set_step(answers[shard].next_step() - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
    }
    return absl::OkStatus();
  }

  absl::Status DropOn(size_t shard, const std::vector<std::string>& names) {
    internal::v1::DropGroupsRequest request;
    request.set_model_id(model_.id);
    request.set_history(model_.history);
    request.mutable_groups()->Add(names.begin(), names.end());
    return shards_[shard].DropGroups(request, context_).status();
  }

  const ServedModel& model_;
  const std::string& group_;
  const ShardSet& shards_;
  rpc::CallContext* const context_;
  const size_t host_;
};

}  // namespace

absl::StatusOr<v1::DropGroupResponse> DropGroup(const ServedModel& model, const std::string& group,
                                                const ShardSet& shards, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckGroupName("group", group));
  v1::DropGroupResponse response;
  ASSIGN_OR_RETURN(const bool dropped, Dropping(model, group, shards, context).Run());
  response.set_dropped(dropped);
  return response;
}

}  // namespace emberd::server
