#include "server/coordinator/train/train_session.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/random/random.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/checkpoint/manifest.h"
#include "server/coordinator/checkpoints.h"
#include "server/group/group.h"
#include "server/host/collective_router.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {

// ---- Generations of a group on the shards

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

}  // namespace

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

// ---- A trainer's place in its group

namespace {

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

// INVALID_ARGUMENT names the field; unset fields get their defaults.
absl::Status CompleteTrainStart(v1::TrainStart* start) {
  v1::GroupOptions& options = *start->mutable_options();
  if (options.size() == 0) options.set_size(1);
  if (options.consistency() == v1::CONSISTENCY_UNSPECIFIED) options.set_consistency(v1::SYNC);
  if (options.step_timeout_ms() == 0) options.set_step_timeout_ms(kDefaultTimeoutMs);
  const absl::Status status = CheckStart(*start);
  return absl::Status(status.code(), status.ok() ? "" : absl::StrCat("start.", status.message()));
}

}  // namespace

// Where the ranks of a SYNC group waited for each other. Adds up over the exchanges of a request.
struct RankWait {
  absl::Duration waited;
  // The last to come to the exchange where that made most of a difference; -1: there was none.
  int slowest_rank = -1;
  absl::Duration slowest_by;  // how long after the first
};

// One trainer's place in its group: joining, what the ranks tell each other in a step, and leaving.
// Methods may be called from several threads. Errors end the member's generation for all ranks when
// it leaves, so the caller leaves after any.
class GroupMember {
 public:
  // Joins, waits for the other ranks (SYNC), and finds out on the shards where the group is: a step
  // that some shard applied while others only hold its parts is finished there first.
  // FAILED_PRECONDITION: shards disagree and cannot be brought together. `resources` must outlive
  // it.
  static absl::StatusOr<std::unique_ptr<GroupMember>> Join(const CoordinatorResources& resources,
                                                           step::ServedModelPtr model,
                                                           const v1::TrainStart& start,
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
  ~GroupMember() { Leave("its stream ended", /*finished=*/false); }

  const v1::GroupOptions& options() const { return start_.options(); }
  int64_t next_step() const { return next_step_; }
  uint64_t generation() const { return opened_.generation; }
  uint64_t made_generation() const { return opened_.made_generation; }
  absl::Duration step_timeout() const {
    return absl::Milliseconds(start_.options().step_timeout_ms());
  }
  const std::string& group() const { return start_.group(); }
  int rank() const { return start_.rank(); }
  // Names this rank's part of a step to the shards.
  host::GroupPart Part(int64_t step) const {
    host::GroupPart part;
    part.set_group(shard_group_);
    part.set_generation(opened_.generation);
    part.set_rank(sync() ? start_.rank() : 0);
    part.set_size(sync() ? start_.options().size() : 1);
    part.set_step(step);
    return part;
  }

  // What the ranks of a SYNC group bring to one of the exchanges of a step, by rank, when all have
  // brought it; of other groups, what this one brings.
  absl::StatusOr<std::vector<std::string>> Exchange(int group_key, int64_t step, std::string value,
                                                    rpc::CallContext* context, RankWait* wait) {
    if (!sync() || start_.options().size() == 1) return std::vector<std::string>{std::move(value)};
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
  // BOUNDED: waits until no other rank is too far behind for step `step` to begin. Ranks that wait
  // for no others: asks whether they are still known where the ranks meet, because they hear of
  // that nowhere else.
  absl::Status WaitForProgress(int64_t step, rpc::CallContext* context, RankWait* wait) {
    if (sync() && start_.options().size() > 1) return absl::OkStatus();  // exchanges tell
    if (!bounded()) return CheckMember();
    auto request = AsMember<internal::v1::AdvanceRequest>();
    const absl::Time began = SteadyNow();
    rpc::LinkedContext waiting(context, step_timeout() + kExchangeMargin);
    request.set_next_step(step);
    request.set_wait_for(std::max<int64_t>(0, step - start_.options().staleness_bound()));
    absl::Status status = resources_.collective->Advance(request, waiting.get());
    wait->waited += SteadyNow() - began;
    return status;
  }
  // BOUNDED: every step before `next_step` is done.
  absl::Status TellProgress(int64_t next_step, rpc::CallContext* context) {
    if (!bounded()) return absl::OkStatus();
    rpc::LinkedContext telling(context, kExchangeMargin);
    auto request = AsMember<internal::v1::AdvanceRequest>();
    request.set_next_step(next_step);
    for (auto& rank : std::exchange(opened_.ranks, {})) *request.add_ranks() = std::move(rank);
    return resources_.collective->Advance(request, telling.get());
  }

  // `finished`: the trainer ended its stream in order. Only the first call counts, and a later one
  // with `finished`.
  void Leave(const std::string& reason, bool finished) {
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

 private:
  GroupMember(const CoordinatorResources& resources, step::ServedModelPtr model,
              const v1::TrainStart& start, uint64_t membership)
      : resources_(resources),
        model_(std::move(model)),
        start_(start),
        membership_(membership),
        watch_(resources.collective->WatchOf(AsMember<internal::v1::AdvanceRequest>().name(),
                                             membership)),
        shard_group_(sync() ? start.group() : absl::StrCat(start.group(), "#", start.rank())) {}

  bool sync() const { return start_.options().consistency() == v1::SYNC; }
  bool bounded() const { return start_.options().consistency() == v1::BOUNDED; }
  // A request to the host of the group, with what all requests of a member have.
  template <typename Request>
  Request AsMember() const {
    auto request = OfRank<Request>(*model_, start_);
    request.set_generation(membership_);
    return request;
  }
  absl::Status CheckMember() const {
    if (!watch_->cancelled()) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat(
        "group '", group(), "': the shard where its ranks meet was started again or could not be ",
        "reached, or others took the place of its ranks there; join again"));
  }
  // Rank 0 opens the generation on the shards and tells the others; nobody goes on before that.
  absl::Status FindStep(rpc::CallContext* context) {
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
  // But for who opens which generation.
  internal::v1::OpenGroupRequest OpenRequest() const {
    auto request = step::OfRows<internal::v1::OpenGroupRequest>(model_->id, model_->history);
    request.set_group(shard_group_);
    request.set_size(sync() ? start_.options().size() : 1);
    request.set_step_timeout_ms(start_.options().step_timeout_ms());
    return request;
  }
  absl::Status OpenOnShards(rpc::CallContext* context) {
    rpc::LinkedContext opening(context, resources_.shard_call);
    internal::v1::OpenGroupRequest request = OpenRequest();
    if (bounded()) request.set_ranks(start_.options().size());
    ASSIGN_OR_RETURN(opened_, OpenGroup(*resources_.shards, std::move(request), opening.get()));
    RETURN_IF_ERROR(opened_.agreed);
    next_step_ = opened_.next_step < 0 ? start_.options().first_step() : opened_.next_step;
    return absl::OkStatus();
  }

  const CoordinatorResources& resources_;
  const step::ServedModelPtr model_;
  const v1::TrainStart start_;
  const uint64_t membership_;  // the generation at the host of the group, which counts its own
  const std::shared_ptr<const rpc::CallContext> watch_;  // see CollectiveRouter::WatchOf
  // ASYNC and BOUNDED ranks are groups of their own to the shards.
  const std::string shard_group_;
  // On the shards. SYNC: rank 0 has opened it, and has told the others what they know of it.
  OpenedGroup opened_;
  int64_t next_step_ = 0;

  absl::Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

// ---- The checkpoints that a stream asks for

// Each holds exactly the steps up to one of the stream's own: later steps of the group are held
// back before that one can be made, and go on when the moment has been fixed. The files are written
// in the background. Used by the one thread that makes the stream's updates.
class StreamCheckpoints {
 public:
  // `checkpoints` must outlive it. `shard_call`: how long shards may take for what they are asked.
  StreamCheckpoints(Checkpoints* checkpoints, step::ServedModelPtr model, absl::Duration shard_call)
      : checkpoints_(checkpoints), model_(std::move(model)), shard_call_(shard_call) {}

  // To be called before `part`, the stream's own, is given to any shard. An empty name asks for
  // nothing. Waits until `until` for another save of the model to end, unless the stream is `over`.
  void BeforeStep(const std::string& name, const host::GroupPart& part, absl::Time until,
                  absl::FunctionRef<bool()> over, rpc::CallContext* context) {
    pause_ = nullptr;
    if (name.empty()) return;
    save_ = {.name = name, .incremental = true};
    save_.before.emplace().set_group(part.group());
    save_.before->set_next_step(part.step() + 1);
    absl::Status status = checkpoints_->CheckEnabled();
    if (status.ok()) status = checkpoint::CheckNewCheckpointName(name);
    if (status.ok()) {
      status = InTurn(until, over, [&] {
        pause_ = checkpoints_->MakePause(model_);
        rpc::LinkedContext holding(context, shard_call_);
        const absl::Status held = pause_->HoldGroup(part.group(), part.step(), holding.get());
        if (!held.ok()) pause_ = nullptr;  // no gate stays closed while it is another one's turn
        return held;
      });
    }
    if (!status.ok()) outcomes_->Add(model_->config, {name, part.step(), status});
  }
  // To be called when that step has been made on all shards. Returns when the moment is fixed.
  void AfterStep(rpc::CallContext* context) {
    if (pause_ == nullptr) return;
    const auto ended = [outcomes = outcomes_, model = model_, name = save_.name,
                        step = save_.before->next_step() - 1](const absl::Status& status) {
      outcomes->Add(model->config, {name, step, status});
    };
    rpc::LinkedContext beginning(context, shard_call_);
    auto save = checkpoints_->BeginSave(model_, save_, std::move(pause_), beginning.get());
    if (!save.ok()) return ended(save.status());
    checkpoints_->FinishLater(*std::move(save), ended);
  }
  // Tells the outcome of one checkpoint, if there is one that has not been told.
  void Tell(v1::TrainUpdateResult* result) {
    absl::MutexLock lock(&outcomes_->mutex);
    if (outcomes_->known.empty()) return;
    const Outcome outcome = std::move(outcomes_->known.front());
    outcomes_->known.pop_front();
    result->set_checkpoint(outcome.name);
    result->set_checkpoint_step(outcome.step);
    if (!outcome.status.ok()) {
      result->set_checkpoint_error(std::string(outcome.status.message()));
    }
  }

 private:
  struct Outcome {
    std::string name;
    int64_t step;  // that has asked
    absl::Status status;
  };
  // Shared with the background, which may outlive the stream.
  struct Outcomes {
    absl::Mutex mutex;
    std::deque<Outcome> known ABSL_GUARDED_BY(mutex);
    ops::KeyedLog log{absl::Seconds(5)};  // a stream may ask for a bad name in each step
    // A failure goes to the log, too: no later result of the stream may tell of it.
    void Add(const v1::ModelConfig& model, const Outcome& outcome) {
      if (!outcome.status.ok()) {
        log.Log(absl::StatusCodeToString(outcome.status.code()), ops::LogLevel::kError,
                "a checkpoint could not be saved",
                {{"model", model.name()},
                 {"checkpoint", outcome.name},
                 {"step", outcome.step},
                 {"reason", outcome.status.message()}});
      }
      absl::MutexLock lock(&mutex);
      known.push_back(outcome);
    }
  };

  Checkpoints* const checkpoints_;
  const step::ServedModelPtr model_;
  const absl::Duration shard_call_;
  SaveOptions save_;                    // that the current step asks for
  std::unique_ptr<ChangePause> pause_;  // null: it does not
  const std::shared_ptr<Outcomes> outcomes_ = std::make_shared<Outcomes>();
};

// ---- The steps of a stream

namespace {

int64_t Us(absl::Duration duration) { return absl::ToInt64Microseconds(duration); }

}  // namespace

// The exchanges of the ranks during a lookup or an update, and what a lookup waits for before it
// reads rows.
class TrainSession::Hooks final : public step::StepHooks {
 public:
  Hooks(TrainSession* session, int64_t step, v1::StepTimes* times)
      : session_(session), step_(step), times_(times) {}

  absl::StatusOr<bool> AnyNeedsCuts(bool mine) override {
    ASSIGN_OR_RETURN(const auto needs, Exchange(kNeedCuts, mine ? "1" : "0", &cuts_wait_));
    return std::find(needs.begin(), needs.end(), "1") != needs.end();
  }
  absl::StatusOr<uint64_t> CutsOfAll(uint64_t mine) override {
    ASSIGN_OR_RETURN(const auto values, Exchange(kCuts, absl::StrCat(mine), &cuts_wait_));
    uint64_t cuts = mine;
    for (const std::string& value : values) {
      ASSIGN_OR_RETURN(const uint64_t theirs, UnpackInt(value));
      cuts |= theirs;
    }
    return cuts;
  }
  absl::Status BeforeGather() override {
    session_->Record(cuts_wait_, times_);
    RETURN_IF_ERROR(session_->AwaitUpdates(step_, times_));
    RankWait wait;
    absl::Status status = session_->member_->WaitForProgress(step_, session_->context_, &wait);
    session_->Record(wait, times_);
    return status;
  }
  absl::Duration gather_limit() const override { return session_->resources_.shard_call; }
  bool owns_batch() const override { return true; }
  void OnKept(uint64_t batch_handle) override { session_->Gathered(step_, batch_handle); }
  // All shards hold this rank's part, so when every rank says so, all hold the parts of all ranks.
  absl::Status BeforeCommit() override {
    RankWait wait;
    absl::Status status = Exchange(kStaged, "", &wait).status();
    session_->Record(wait, times_);
    return status;
  }

 private:
  absl::StatusOr<std::vector<std::string>> Exchange(int group_key, std::string value,
                                                    RankWait* wait) {
    return session_->member_->Exchange(group_key, step_, std::move(value), session_->context_,
                                       wait);
  }

  TrainSession* const session_;
  const int64_t step_;
  v1::StepTimes* const times_;
  RankWait cuts_wait_;
};

absl::StatusOr<std::unique_ptr<TrainSession>> TrainSession::Start(
    const CoordinatorResources& resources, v1::TrainStart start, rpc::CallContext* context) {
  RETURN_IF_ERROR(CompleteTrainStart(&start));
  rpc::LinkedContext finding(context, resources.shard_call);
  ASSIGN_OR_RETURN(auto model, resources.registry->FindAnew(start.model_id(), finding.get()));
  RETURN_IF_ERROR(step::CheckTrainable(*model));
  auto member = GroupMember::Join(resources, model, start, context);
  if (!member.ok()) return resources.registry->Explain(model->id, model->history, member.status());
  return std::unique_ptr<TrainSession>(
      new TrainSession(resources, std::move(model), *std::move(member), context));
}

TrainSession::TrainSession(const CoordinatorResources& resources, step::ServedModelPtr model,
                           std::unique_ptr<GroupMember> member, rpc::CallContext* context)
    : resources_(resources),
      model_(std::move(model)),
      member_(std::move(member)),
      context_(context),
      metrics_(resources.metrics->Group(model_->config.name(), member_->group())),
      checkpoints_(
          std::make_unique<StreamCheckpoints>(resources.checkpoints, model_, resources.shard_call)),
      next_lookup_(member_->next_step()),
      next_update_(next_lookup_),
      next_gather_(next_lookup_),
      next_apply_(next_lookup_),
      watch_(context, [this] { Fail(absl::CancelledError("the trainer cancelled its stream")); }) {}

TrainSession::~TrainSession() {
  std::map<int64_t, Step> unfinished;
  {
    absl::MutexLock lock(&mutex_);
    unfinished.swap(steps_);
  }
  for (const auto& [number, step] : unfinished) resources_.path->Discard(model_->id, step.handle);
}

bool TrainSession::pipelined() const { return member_->options().pipelined(); }

void TrainSession::Leave() {
  member_->Leave("its trainer has ended the stream", /*finished=*/false);
}

v1::TrainStarted TrainSession::started() const {
  v1::TrainStarted started;
  started.set_next_step(member_->next_step());
  started.set_generation(member_->generation());
  started.set_made_generation(member_->made_generation());
  return started;
}

absl::Status TrainSession::AdmitLookup(int64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step != next_lookup_) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup.step is ", step, "; the next lookup is that of step ", next_lookup_));
  }
  if (step - next_update_ >= kMaxLookupsAhead) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup.step is ", step, ", but the update of step ", next_update_,
                     " has not been sent; at most ", kMaxLookupsAhead, " lookups may be ahead"));
  }
  ++next_lookup_;
  return absl::OkStatus();
}

absl::Status TrainSession::AdmitUpdate(int64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step != next_update_) {
    return absl::InvalidArgumentError(
        absl::StrCat("update.step is ", step, "; the next update is that of step ", next_update_));
  }
  if (step >= next_lookup_) {
    return absl::InvalidArgumentError(
        absl::StrCat("update.step is ", step, ", but its lookup has not been sent"));
  }
  ++next_update_;
  return absl::OkStatus();
}

void TrainSession::EndRequests() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

void TrainSession::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  metrics_->AddFailure(status.code());
}

void TrainSession::FailStep(const std::string& what, const absl::Status& status) {
  Fail(status);
  member_->Leave(absl::StrCat(what, ": ", status.message()), /*finished=*/false);
}

void TrainSession::Finish() {
  const absl::Status failure = Failure();
  member_->Leave(failure.ok() ? "it has finished" : std::string(failure.message()),
                 /*finished=*/failure.ok());
}

absl::Status TrainSession::Failure() {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status TrainSession::Await(const std::function<bool()>& ready, const std::string& what,
                                 v1::StepTimes* times) {
  const absl::Time began = SteadyNow();
  const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !failure_.ok() || ready(); };
  absl::MutexLock lock(&mutex_);
  const bool in_time = AwaitSteadily(&mutex_, absl::Condition(&over), member_->step_timeout());
  const absl::Duration waited = SteadyNow() - began;
  times->set_wait_for_update_us(Us(waited));
  resources_.metrics->ObserveStage(ops::Stage::kWaitForUpdate, absl::ToDoubleSeconds(waited));
  if (!in_time) return absl::DeadlineExceededError(absl::StrCat(what, ": it did not come in time"));
  return failure_;
}

void TrainSession::Record(const RankWait& wait, v1::StepTimes* times) {
  times->set_wait_for_ranks_us(times->wait_for_ranks_us() + Us(wait.waited));
  if (wait.slowest_rank >= 0) {
    times->set_slowest_rank(wait.slowest_rank);
    resources_.metrics->ObserveStage(ops::Stage::kWaitForRanks, absl::ToDoubleSeconds(wait.waited));
  }
}

absl::StatusOr<TrainLookupOutput> TrainSession::Lookup(const step::TrainStepRequest& request) {
  auto output = TryLookup(request);
  if (!output.ok()) output = Explain(output.status());
  if (output.ok()) {
    metrics_->ObserveLookup(output->times);
    metrics_->AddDropped(member_->rank(), output->lookup.statistics);
  } else {
    FailStep(absl::StrCat("lookup of step ", request.step), output.status());
  }
  return output;
}

absl::StatusOr<v1::TrainUpdateResult> TrainSession::Update(const step::TrainStepRequest& request) {
  auto result = TryUpdate(request);
  if (!result.ok()) result = Explain(result.status());
  if (result.ok()) {
    metrics_->ObserveUpdate(result->times());
  } else {
    FailStep(absl::StrCat("update of step ", request.step), result.status());
  }
  return result;
}

absl::StatusOr<TrainLookupOutput> TrainSession::TryLookup(const step::TrainStepRequest& request) {
  RETURN_IF_ERROR(Failure());
  const absl::Time began = SteadyNow();
  TrainLookupOutput output;
  output.times.set_slowest_rank(-1);
  Hooks hooks(this, request.step, &output.times);
  ASSIGN_OR_RETURN(output.lookup, resources_.path->Lookup(model_, *request.lookup, context_, &hooks,
                                                          &output.times));
  absl::MutexLock lock(&mutex_);
  const auto found = steps_.find(request.step);  // gone if the trainer did not wait for the answer
  if (found != steps_.end()) found->second.lookup_time = SteadyNow() - began;
  return output;
}

absl::Status TrainSession::AwaitUpdates(int64_t step, v1::StepTimes* times) {
  const int64_t unseen = pipelined() ? 1 : 0;
  return Await([&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return next_apply_ >= step - unseen; },
               absl::StrCat("the lookup of step ", step, " waits for the update of step ",
                            step - unseen - 1),
               times);
}

void TrainSession::Gathered(int64_t step, uint64_t handle) {
  absl::MutexLock lock(&mutex_);
  steps_[step].handle = handle;
  next_gather_ = step + 1;
}

absl::StatusOr<v1::TrainUpdateResult> TrainSession::TryUpdate(
    const step::TrainStepRequest& request) {
  const int64_t step = request.step;
  const step::TrainUpdateRequest& update = *request.update;
  const absl::Time began = SteadyNow();
  v1::TrainUpdateResult result;
  result.set_step(step);
  v1::StepTimes* times = result.mutable_times();
  times->set_slowest_rank(-1);
  RETURN_IF_ERROR(AwaitLookups(step, times));
  step::UpdateName name;
  name.model_id = model_->id;
  name.group_part = member_->Part(step);
  name.skip = update.skip;
  {
    absl::MutexLock lock(&mutex_);
    name.handle = steps_.at(step).handle;
  }
  // The other ranks may wait for this step meanwhile, for step_timeout.
  checkpoints_->BeforeStep(
      update.checkpoint, *name.group_part, began + member_->step_timeout() / 2,
      [this] { return failed(); }, context_);
  Hooks hooks(this, step, times);
  ASSIGN_OR_RETURN(const step::MadeMutation made,
                   resources_.path->Update(name, update.gradients, context_, &hooks, times));
  checkpoints_->AfterStep(context_);
  checkpoints_->Tell(&result);
  host::SetRowCounts(made.rows, &result);

  absl::Duration lookup_time;
  {
    absl::MutexLock lock(&mutex_);
    next_apply_ = step + 1;
    lookup_time = steps_.at(step).lookup_time;
    steps_.erase(step);
  }
  LogIfSlow(step, lookup_time + (SteadyNow() - began), *times);
  RETURN_IF_ERROR(member_->TellProgress(step + 1, context_));
  return result;
}

absl::Status TrainSession::AwaitLookups(int64_t step, v1::StepTimes* times) {
  // Pipelined: the next lookup must not see this update, so it goes first.
  const int64_t last = pipelined() ? step + 1 : step;
  return Await(
      [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return next_gather_ > last || (pipelined() && ended_ && next_lookup_ == next_gather_);
      },
      absl::StrCat("the update of step ", step, " waits for the lookup of step ", last), times);
}

void TrainSession::LogIfSlow(int64_t step, absl::Duration time, const v1::StepTimes& times) {
  if (time < resources_.slow_step) return;
  ops::Log(ops::LogLevel::kWarning, "slow step",
           {{"model", model_->config.name()},
            {"group", member_->group()},
            {"rank", member_->rank()},
            {"step", step},
            {"ms", absl::ToInt64Milliseconds(time)},
            {"wait_for_ranks_us", times.wait_for_ranks_us()},
            {"slowest_rank", times.slowest_rank()},
            {"wait_for_lookup_us", times.wait_for_update_us()},
            {"shards_us", times.shards_us()},
            {"trace", rpc::TraceId(context_->trace())}});
}

}  // namespace emberd::coordinator
