#include "server/coordinator/train/group_opening.h"

#include <algorithm>
#include <map>
#include <string>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
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
absl::StatusOr<OpenAnswers> TakeNumber(Fanout* fanout, OpenGroupRequest* request,
                                       rpc::CallContext* context) {
  absl::BitGen random;
  for (int attempt = 1;; ++attempt) {
    request->set_generation(0);
    ASSIGN_OR_RETURN(const OpenAnswers asked, fanout->OpenGroup(*request, context));
    uint64_t newest = 0;
    for (const OpenGroupResponse& shard : asked) newest = std::max(newest, shard.generation());
    request->set_generation(newest + 1);
    request->set_opener(absl::Uniform<uint64_t>(random, 1, ~uint64_t{0}));
    absl::StatusOr<OpenAnswers> opened = fanout->OpenGroup(*request, context);
    if (!absl::IsAborted(opened.status()) || attempt == kOpenAttempts) return opened;
    absl::SleepFor(absl::Uniform(random, 0.0, 1.0) * kMostOpenPause);
  }
}

// A step was decided if any shard has made it, and then all hold it or have made it.
// Fills in the step that all shards have reached then.
absl::Status FinishStep(Fanout* fanout, const OpenGroupRequest& request, const OpenAnswers& shards,
                        rpc::CallContext* context, OpenedGroup* opened) {
  for (const OpenGroupResponse& shard : shards) {
    if (!shard.known() || shard.next_step() < opened->next_step) continue;
    opened->next_step = shard.next_step();
    opened->made_generation = shard.made_generation();
  }
  const int64_t next = opened->next_step;
  if (next < 0) return absl::OkStatus();
  for (size_t i = 0; i < shards.size(); ++i) {
    const OpenGroupResponse& shard = shards[i];
    if (shard.known() && shard.next_step() == next) continue;
    if (shard.staged_step() == next - 1) {
      internal::v1::DecideStepRequest decision;
      decision.set_model_id(request.model_id());
      decision.set_history(request.history());
      decision.set_group(request.group());
      decision.set_generation(request.generation());
      decision.set_step(next - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(fanout->DecideStep(static_cast<int>(i), decision, context).status());
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
std::vector<RankProgress> MergeRanks(const OpenAnswers& shards) {
  std::map<int, RankProgress> ranks;
  for (const OpenGroupResponse& shard : shards) {
    for (const internal::v1::RankProgress& from : shard.ranks()) {
      RankProgress& to = ranks[from.rank()];
      to.rank = from.rank();
      to.next_step = std::max(to.next_step, from.next_step());
      to.finished = to.finished || from.finished();
    }
  }
  std::vector<RankProgress> merged;
  for (const auto& [rank, progress] : ranks) merged.push_back(progress);
  return merged;
}

}  // namespace

absl::StatusOr<OpenedGroup> OpenGroup(Fanout* fanout, OpenGroupRequest request,
                                      rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const OpenAnswers shards, TakeNumber(fanout, &request, context));
  OpenedGroup opened;
  opened.generation = request.generation();
  opened.opener = request.opener();
  RETURN_IF_ERROR(FinishStep(fanout, request, shards, context, &opened));
  opened.ranks = MergeRanks(shards);
  return opened;
}

}  // namespace emberd::server
