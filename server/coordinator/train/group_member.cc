#include "server/coordinator/train/group_member.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/group/group.h"
#include "server/host/collective_router.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {
namespace {

using internal::v1::OpenGroupRequest;
using internal::v1::OpenGroupResponse;

constexpr int kOpenAttempts = 5;
// Two coordinators that got into each other's way should not do so again.
constexpr absl::Duration kMostOpenPause = absl::Milliseconds(20);

using OpenAnswers = std::vector<OpenGroupResponse>;

// The next number, opened on all shards; `request` keeps it.
absl::StatusOr<OpenAnswers> TakeNumber(const step::ShardSet& shards, OpenGroupRequest* request,
                                       rpc::CallContext* context) {
  absl::BitGen random;
  for (int attempt = 1;; ++attempt) {
    request->set_generation(0);
    ASSIGN_OR_RETURN(const OpenAnswers asked,
                     shards.Ask(&host::ShardBackend::OpenGroup, *request, context));
    uint64_t newest = 0;
    for (const OpenGroupResponse& shard : asked) newest = std::max(newest, shard.generation());
    request->set_generation(newest + 1);
    request->set_opener(rpc::RandomId());
    absl::StatusOr<OpenAnswers> opened =
        shards.Ask(&host::ShardBackend::OpenGroup, *request, context);
    if (!absl::IsAborted(opened.status()) || attempt == kOpenAttempts) return opened;
    absl::SleepFor(absl::Uniform(random, 0.0, 1.0) * kMostOpenPause);
  }
}

// A step was decided if any shard has made it; then the other shards hold it, or have made it, too.
// Makes it on those that hold it, and tells `opened` the step that all shards have reached.
absl::Status FinishStep(const step::ShardSet& shards, const OpenGroupRequest& request,
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
      auto decision =
          step::OfRows<internal::v1::DecideStepRequest>(request.model_id(), request.history());
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

// `request` has everything but generation and opener. A step that some shard has applied while
// others only hold its parts is finished first. ABORTED: others begin the group at the same time,
// again and again.
absl::StatusOr<OpenedGroup> OpenGroup(const step::ShardSet& shards, OpenGroupRequest request,
                                      rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const OpenAnswers answers, TakeNumber(shards, &request, context));
  OpenedGroup opened;
  opened.generation = request.generation();
  opened.opener = request.opener();
  RETURN_IF_ERROR(FinishStep(shards, request, answers, context, &opened));
  opened.ranks = MergeRanks(answers);
  return opened;
}

// One call of DropGroup.
class Dropping {
 public:
  Dropping(const step::ServedModel& model, const std::string& group, const step::ShardSet& shards,
           rpc::CallContext* context)
      : model_(model),
        group_(group),
        shards_(shards),
        context_(context),
        host_(group::HostOf({model.id, group}, static_cast<int>(shards.size()))) {}

  absl::StatusOr<v1::DropGroupResponse> Run() {
    // Fails before anything changes, if a rank is at work or a shard is not there.
    RETURN_IF_ERROR(DropOn(host_, {absl::StrCat(group_, "#")}));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, FindNames());
    for (const std::string& name : names) RETURN_IF_ERROR(FinishLastStep(name));
    // The host first, which may refuse.
    RETURN_IF_ERROR(DropOn(host_, names));
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (shard != host_) RETURN_IF_ERROR(DropOn(shard, names));
    }
    v1::DropGroupResponse response;
    response.set_dropped(!names.empty());
    return response;
  }

 private:
  internal::v1::OpenGroupRequest OpenRequest(const std::string& name) const {
    auto request = step::OfRows<OpenGroupRequest>(model_.id, model_.history);
    request.set_group(name);
    return request;
  }

  // The names of the group that any shard knows.
  absl::StatusOr<std::vector<std::string>> FindNames() {
    internal::v1::OpenGroupRequest request = OpenRequest(absl::StrCat(group_, "#0"));
    request.set_ranks(group::kMaxGroupSize);
    ASSIGN_OR_RETURN(const auto answers,
                     shards_.Ask(&host::ShardBackend::OpenGroup, request, context_));
    std::set<std::string> names;
    for (const auto& shard : answers) {
      for (const auto& rank : shard.ranks()) names.insert(absl::StrCat(group_, "#", rank.rank()));
    }
    ASSIGN_OR_RETURN(const auto sync,
                     shards_.Ask(&host::ShardBackend::OpenGroup, OpenRequest(group_), context_));
    for (const auto& shard : sync) {
      if (shard.here()) names.insert(group_);
    }
    return std::vector<std::string>(names.begin(), names.end());
  }

  // Opens a generation of its own. From then on, the shards take neither parts nor decisions of the
  // earlier ranks, which their coordinators may have sent. A step that is still held was made
  // nowhere.
  absl::Status FinishLastStep(const std::string& name) {
    internal::v1::OpenGroupRequest request = OpenRequest(name);
    request.set_size(1);
    ASSIGN_OR_RETURN(const OpenedGroup opened, OpenGroup(shards_, request, context_));
    ASSIGN_OR_RETURN(const auto answers,
                     shards_.Ask(&host::ShardBackend::OpenGroup, OpenRequest(name), context_));
    auto decision = step::OfRows<internal::v1::DecideStepRequest>(model_.id, model_.history);
    decision.set_group(name);
    decision.set_generation(opened.generation);
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (answers[shard].staged_step() >= 0) {
        decision.set_step(answers[shard].staged_step());
        decision.set_commit(false);
        RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
      }
      if (!answers[shard].known()) continue;
      // It is decided, but may not have reached the rows.
      decision.set_step(answers[shard].next_step() - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
    }
    return absl::OkStatus();
  }

  absl::Status DropOn(size_t shard, const std::vector<std::string>& names) {
    auto request = step::OfRows<internal::v1::DropGroupsRequest>(model_.id, model_.history);
    request.mutable_groups()->Add(names.begin(), names.end());
    return shards_[shard].DropGroups(request, context_).status();
  }

  const step::ServedModel& model_;
  const std::string& group_;
  const step::ShardSet& shards_;
  rpc::CallContext* const context_;
  const size_t host_;
};

constexpr int64_t kDefaultTimeoutMs = 60'000;
// Beyond the members' own timeout, for the way to the host of the group and back.
constexpr absl::Duration kExchangeMargin = absl::Seconds(5);

// Exchanges of a step.
constexpr int kFindStep = 1;
constexpr int kNeedCuts = 2;
constexpr int kCuts = 3;
constexpr int kStaged = 4;

// What a trainer may say about its group, after the defaults.
absl::Status CheckStart(const v1::TrainStart& start) {
  const v1::GroupOptions& options = start.options();
  RETURN_IF_ERROR(group::CheckGroupName("group", start.group()));
  RETURN_IF_ERROR(group::CheckGroupOptions(options));
  RETURN_IF_ERROR(group::CheckRank(start.rank(), options.size()));
  if (options.consistency() != v1::BOUNDED) {
    RETURN_IF_ERROR(
        group::CheckInRange("options.staleness_bound", options.staleness_bound(), 0, 0));
  }
  if (options.consistency() != v1::SYNC && options.pipelined()) {
    return absl::InvalidArgumentError("options.pipelined is true; only a SYNC group may be");
  }
  return absl::OkStatus();
}

// A request to the host of the group.
template <typename Request>
Request OfRank(const step::ServedModel& model, const v1::TrainStart& start) {
  Request request;
  request.mutable_name()->set_model_id(model.id);
  request.mutable_name()->set_group(start.group());
  request.set_rank(start.rank());
  return request;
}

absl::StatusOr<uint64_t> UnpackInt(const std::string& bytes) {
  uint64_t value = 0;
  if (absl::SimpleAtoi(bytes, &value)) return value;
  return absl::InternalError(absl::StrCat("another rank sent '", absl::CHexEscape(bytes),
                                          "' in an exchange; it must be a whole number"));
}

}  // namespace

absl::StatusOr<v1::DropGroupResponse> DropGroup(const step::ServedModel& model,
                                                const std::string& group,
                                                const step::ShardSet& shards,
                                                rpc::CallContext* context) {
  RETURN_IF_ERROR(group::CheckGroupName("group", group));
  return Dropping(model, group, shards, context).Run();
}

absl::Status CompleteTrainStart(v1::TrainStart* start) {
  v1::GroupOptions& options = *start->mutable_options();
  if (options.size() == 0) options.set_size(1);
  if (options.consistency() == v1::CONSISTENCY_UNSPECIFIED) options.set_consistency(v1::SYNC);
  if (options.step_timeout_ms() == 0) options.set_step_timeout_ms(kDefaultTimeoutMs);
  const absl::Status status = CheckStart(*start);
  return absl::Status(status.code(), status.ok() ? "" : absl::StrCat("start.", status.message()));
}

GroupMember::GroupMember(const CoordinatorResources& resources, step::ServedModelPtr model,
                         const v1::TrainStart& start, uint64_t membership)
    : resources_(resources),
      model_(std::move(model)),
      start_(start),
      membership_(membership),
      shard_group_(sync() ? start.group() : absl::StrCat(start.group(), "#", start.rank())) {}

GroupMember::~GroupMember() { Leave("its stream ended", /*finished=*/false); }

absl::StatusOr<std::unique_ptr<GroupMember>> GroupMember::Join(
    const CoordinatorResources& resources, step::ServedModelPtr model, const v1::TrainStart& start,
    rpc::CallContext* context) {
  rpc::LinkedContext joining(
      context, absl::Milliseconds(start.options().step_timeout_ms()) + kExchangeMargin);
  auto request = OfRank<internal::v1::JoinRequest>(*model, start);
  *request.mutable_options() = start.options();
  request.set_coordinator(resources.identity);
  request.set_history(model->history);
  ASSIGN_OR_RETURN(const auto membership, resources.collective->Join(request, joining.get()));
  auto member = std::unique_ptr<GroupMember>(
      new GroupMember(resources, std::move(model), start, membership.generation()));
  if (absl::Status status = member->FindStep(context); !status.ok()) {
    member->Leave(absl::StrCat("joining: ", status.message()), /*finished=*/false);
    return status;
  }
  return member;
}

template <typename Request>
Request GroupMember::AsMember() const {
  auto request = OfRank<Request>(*model_, start_);
  request.set_generation(membership_);
  return request;
}

// Rank 0 opens the generation on the shards and tells the others; nobody goes on before that.
absl::Status GroupMember::FindStep(rpc::CallContext* context) {
  absl::Status opened;
  if (!sync() || start_.rank() == 0) opened = OpenOnShards(context);
  if (!opened.ok() || !sync()) return opened.ok() ? TellProgress(next_step_, context) : opened;
  RankWait wait;
  const std::string mine =
      absl::StrCat(next_step_, " ", opened_.generation, " ", opened_.made_generation);
  ASSIGN_OR_RETURN(const auto values, Exchange(kFindStep, 0, mine, context, &wait));
  std::vector<std::string> agreed = absl::StrSplit(values.front(), ' ');
  agreed.resize(3, "0");  // a coordinator of an older version does not say the last
  ASSIGN_OR_RETURN(const uint64_t step, UnpackInt(agreed[0]));
  ASSIGN_OR_RETURN(opened_.generation, UnpackInt(agreed[1]));
  ASSIGN_OR_RETURN(opened_.made_generation, UnpackInt(agreed[2]));
  next_step_ = static_cast<int64_t>(step);
  return absl::OkStatus();
}

internal::v1::OpenGroupRequest GroupMember::OpenRequest() const {
  auto request = step::OfRows<internal::v1::OpenGroupRequest>(model_->id, model_->history);
  request.set_group(shard_group_);
  request.set_size(sync() ? start_.options().size() : 1);
  request.set_step_timeout_ms(start_.options().step_timeout_ms());
  return request;
}

absl::Status GroupMember::OpenOnShards(rpc::CallContext* context) {
  rpc::LinkedContext opening(context, resources_.shard_call);
  internal::v1::OpenGroupRequest request = OpenRequest();
  if (bounded()) request.set_ranks(start_.options().size());
  ASSIGN_OR_RETURN(opened_, OpenGroup(*resources_.shards, std::move(request), opening.get()));
  RETURN_IF_ERROR(opened_.agreed);
  next_step_ = opened_.next_step < 0 ? start_.options().first_step() : opened_.next_step;
  return absl::OkStatus();
}

host::GroupPart GroupMember::Part(int64_t step) const {
  host::GroupPart part;
  part.set_group(shard_group_);
  part.set_generation(opened_.generation);
  part.set_rank(sync() ? start_.rank() : 0);
  part.set_size(sync() ? start_.options().size() : 1);
  part.set_step(step);
  return part;
}

absl::StatusOr<std::vector<std::string>> GroupMember::Exchange(int group_key, int64_t step,
                                                               std::string value,
                                                               rpc::CallContext* context,
                                                               RankWait* wait) {
  if (start_.options().size() == 1) return std::vector<std::string>{std::move(value)};
  const absl::Time began = SteadyNow();
  rpc::LinkedContext exchanging(context, step_timeout() + kExchangeMargin);
  auto request = AsMember<internal::v1::AllGatherRequest>();
  request.set_group_key(group_key);
  request.set_instance_key(step);
  request.set_value(std::move(value));
  const auto gathered = resources_.collective->AllGather(request, exchanging.get());
  wait->waited += SteadyNow() - began;
  if (!gathered.ok()) return gathered.status();
  const auto& arrival_us = gathered->arrival_us();
  const auto last = std::max_element(arrival_us.begin(), arrival_us.end());
  if (wait->slowest_rank < 0 || absl::Microseconds(*last) > wait->slowest_by) {
    wait->slowest_rank = static_cast<int>(last - arrival_us.begin());
    wait->slowest_by = absl::Microseconds(*last);
  }
  return std::vector<std::string>(gathered->values().begin(), gathered->values().end());
}

absl::StatusOr<bool> GroupMember::AnyNeedsCuts(int64_t step, bool mine, rpc::CallContext* context,
                                               RankWait* wait) {
  if (!sync()) return mine;
  ASSIGN_OR_RETURN(const auto needs, Exchange(kNeedCuts, step, mine ? "1" : "0", context, wait));
  return std::find(needs.begin(), needs.end(), "1") != needs.end();
}

absl::StatusOr<uint64_t> GroupMember::CutsOfAll(int64_t step, uint64_t mine,
                                                rpc::CallContext* context, RankWait* wait) {
  if (!sync()) return mine;
  ASSIGN_OR_RETURN(const auto values, Exchange(kCuts, step, absl::StrCat(mine), context, wait));
  uint64_t cuts = mine;
  for (const std::string& value : values) {
    ASSIGN_OR_RETURN(const uint64_t theirs, UnpackInt(value));
    cuts |= theirs;
  }
  return cuts;
}

absl::Status GroupMember::AllStaged(int64_t step, rpc::CallContext* context, RankWait* wait) {
  if (!sync()) return absl::OkStatus();
  return Exchange(kStaged, step, "", context, wait).status();
}

absl::Status GroupMember::WaitForProgress(int64_t step, rpc::CallContext* context, RankWait* wait) {
  auto request = AsMember<internal::v1::AdvanceRequest>();
  if (sync() && start_.options().size() > 1) return absl::OkStatus();  // exchanges tell
  if (!bounded()) return resources_.collective->CheckMember(request.name(), membership_);
  const absl::Time began = SteadyNow();
  rpc::LinkedContext waiting(context, step_timeout() + kExchangeMargin);
  request.set_next_step(step);
  request.set_wait_for(std::max<int64_t>(0, step - start_.options().staleness_bound()));
  absl::Status status = resources_.collective->Advance(request, waiting.get());
  wait->waited += SteadyNow() - began;
  return status;
}

absl::Status GroupMember::TellProgress(int64_t next_step, rpc::CallContext* context) {
  if (!bounded()) return absl::OkStatus();
  rpc::LinkedContext telling(context, kExchangeMargin);
  auto request = AsMember<internal::v1::AdvanceRequest>();
  request.set_next_step(next_step);
  for (auto& rank : std::exchange(opened_.ranks, {})) *request.add_ranks() = std::move(rank);
  return resources_.collective->Advance(request, telling.get());
}

void GroupMember::Leave(const std::string& reason, bool finished) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(left_, true) && !(finished && bounded())) return;
  }
  auto request = AsMember<internal::v1::LeaveRequest>();
  request.set_reason(reason);
  request.set_finished(finished);
  if (!finished || !bounded()) return resources_.collective->Leave(request);
  // The leave tells the host, which forgets it when it is started again. So the shards are told,
  // too.
  internal::v1::OpenGroupRequest told = OpenRequest();
  told.set_generation(opened_.generation);
  told.set_opener(opened_.opener);
  told.set_finished(true);
  resources_.collective->Leave(request, std::move(told));
}

}  // namespace emberd::coordinator
