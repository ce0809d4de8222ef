#include "server/coordinator/train/train_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/checkpoint/manifest.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {
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
    return session_->member_->AnyNeedsCuts(step_, mine, session_->context_, &cuts_wait_);
  }
  absl::StatusOr<uint64_t> CutsOfAll(uint64_t mine) override {
    return session_->member_->CutsOfAll(step_, mine, session_->context_, &cuts_wait_);
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
  absl::Status BeforeCommit() override {
    RankWait wait;
    absl::Status status = session_->member_->AllStaged(step_, session_->context_, &wait);
    session_->Record(wait, times_);
    return status;
  }

 private:
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
      checkpoints_(resources.checkpoints, model_),
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
  checkpoints_.BeforeStep(
      update.checkpoint, *name.group_part, began + member_->step_timeout() / 2,
      [this] { return failed(); }, context_);
  Hooks hooks(this, step, times);
  ASSIGN_OR_RETURN(const step::MadeMutation made,
                   resources_.path->Update(name, update.gradients, context_, &hooks, times));
  checkpoints_.AfterStep(context_);
  checkpoints_.Tell(&result);
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

void StreamCheckpoints::Outcomes::Add(const v1::ModelConfig& model, const Outcome& outcome) {
  if (!outcome.status.ok()) {
    ops::Log(ops::LogLevel::kError, "a checkpoint could not be saved",
             {{"model", model.name()},
              {"checkpoint", outcome.name},
              {"step", outcome.step},
              {"reason", outcome.status.message()}});
  }
  MutexLock lock(&mutex);
  known.push_back(outcome);
}

void StreamCheckpoints::BeforeStep(const std::string& name, const host::GroupPart& part,
                                   absl::Time until, absl::FunctionRef<bool()> over,
                                   rpc::CallContext* context) {
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
      const absl::Status held = pause_->HoldGroup(part.group(), part.step(), context);
      if (!held.ok()) pause_ = nullptr;  // no gate stays closed while it is another one's turn
      return held;
    });
  }
  if (!status.ok()) outcomes_->Add(model_->config, {name, part.step(), status});
}

void StreamCheckpoints::AfterStep(rpc::CallContext* context) {
  if (pause_ == nullptr) return;
  const auto ended = [outcomes = outcomes_, model = model_, name = save_.name,
                      step = save_.before->next_step() - 1](const absl::Status& status) {
    outcomes->Add(model->config, {name, step, status});
  };
  auto save = checkpoints_->BeginSave(model_, save_, std::move(pause_), context);
  if (!save.ok()) return ended(save.status());
  checkpoints_->FinishLater(*std::move(save), ended);
}

void StreamCheckpoints::Tell(v1::TrainUpdateResult* result) {
  MutexLock lock(&outcomes_->mutex);
  if (outcomes_->known.empty()) return;
  const Outcome outcome = std::move(outcomes_->known.front());
  outcomes_->known.pop_front();
  result->set_checkpoint(outcome.name);
  result->set_checkpoint_step(outcome.step);
  if (!outcome.status.ok()) {
    result->set_checkpoint_error(std::string(outcome.status.message()));
  }
}

}  // namespace emberd::coordinator
