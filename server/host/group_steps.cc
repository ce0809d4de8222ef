#include "server/host/group_steps.h"

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/group/group.h"

namespace emberd::host {

uint64_t GroupGeneration::Newest() const {
  if (number_ > 0 && Mistake("generation.reused")) return number_ - 1;
  return number_;
}

bool GroupGeneration::Is(uint64_t number, uint64_t opener) const {
  return number == number_ && (opener == opener_ || Mistake("generation.reused"));
}

absl::Status GroupGeneration::Open(uint64_t number, uint64_t opener) {
  if (number < number_) {
    return absl::AbortedError(
        absl::StrCat("generation ", number, " is over; the group is in generation ", number_));
  }
  if (number == number_ && !Is(number, opener)) {
    return absl::AbortedError(
        absl::StrCat("generation ", number, " was opened by another member; join again"));
  }
  number_ = number;
  opener_ = opener;
  return absl::OkStatus();
}

namespace {

// An error whose message begins with the group's name.
template <typename... Text>
absl::Status GroupError(absl::StatusCode code, const std::string& group, const Text&... text) {
  return absl::Status(code, absl::StrCat("group '", group, "': ", text...));
}

absl::Status CheckOpen(const internal::v1::OpenGroupRequest& request) {
  if (request.group().empty()) {
    return absl::InvalidArgumentError("group is empty; it must have a name");
  }
  RETURN_IF_ERROR(group::CheckInRange("ranks", request.ranks(), 0, group::kMaxGroupSize));
  if (request.generation() == 0) return absl::OkStatus();
  if (request.opener() == 0) {
    return absl::InvalidArgumentError("opener is 0; it must be a random number");
  }
  return group::CheckInRange("size", request.size(), 1, group::kMaxGroupSize);
}

using internal::v1::LogRecord;

LogRecord PartRecord(uint64_t model_id, const GroupPart& part, const internal::v1::LogBlob& blob) {
  LogRecord record;
  record.mutable_part()->set_model_id(model_id);
  *record.mutable_part()->mutable_part() = part;
  *record.mutable_part()->mutable_blob() = blob;
  return record;
}

LogRecord DecidedRecord(const internal::v1::DecideStepRequest& request) {
  LogRecord record;
  *record.mutable_step_decided() = request;
  return record;
}

template <typename Message>
void SetGroup(uint64_t model_id, const std::string& group, Message* message) {
  message->set_model_id(model_id);
  message->set_group(group);
}

LogRecord StepMadeRecord(uint64_t model_id, const std::string& group, int64_t step,
                         const absl::StatusOr<RowCounts>& rows) {
  LogRecord record;
  SetGroup(model_id, group, record.mutable_step_made());
  record.mutable_step_made()->set_step(step);
  SetResult(rows, record.mutable_step_made());
  return record;
}

LogRecord EndedRecord(uint64_t model_id, const std::string& group) {
  LogRecord record;
  SetGroup(model_id, group, record.mutable_group_ended());
  return record;
}

LogRecord ForgottenRecord(uint64_t model_id, const std::string& group) {
  LogRecord record;
  SetGroup(model_id, group, record.mutable_group_forgotten());
  return record;
}

// What the ranks of an ASYNC or BOUNDED group begin with.
std::string RankPrefix(const std::string& group) { return group.substr(0, group.rfind('#') + 1); }

}  // namespace

GroupSteps::GroupSteps(Options options, shard::Engine* engine, Sequencer* order, ShardLog* log,
                       Hooks hooks)
    : options_(options), engine_(engine), hooks_(std::move(hooks)), log_(log), order_(order) {}

absl::StatusOr<internal::v1::OpenGroupResponse> GroupSteps::Open(
    const internal::v1::OpenGroupRequest& request) {
  RETURN_IF_ERROR(CheckOpen(request));
  std::vector<uint64_t> released;
  internal::v1::OpenGroupResponse response;
  {
    absl::MutexLock lock(&order_->mutex);
    const Key key(request.model_id(), request.group());
    auto found = groups_.find(key);
    if (request.generation() == 0) {
      return Describe(request, found == groups_.end() ? nullptr : &found->second);
    }
    if (found == groups_.end()) RETURN_IF_ERROR(MakeRoom());
    // What is refused now is refused again when the log is read.
    LogRecord opened;
    *opened.mutable_group_opened() = request;
    RETURN_IF_ERROR(log_->Append(opened));
    if (found == groups_.end()) {
      Group group;
      group.generation = GroupGeneration(forgotten_generation_);
      RETURN_IF_ERROR(OpenGroup(request, &group, &released));
      found = groups_.emplace(key, std::move(group)).first;
    } else {
      RETURN_IF_ERROR(OpenGroup(request, &found->second, &released));
    }
    response = Describe(request, &found->second);
  }
  Release(released);
  return response;
}

absl::Status GroupSteps::OpenGroup(const internal::v1::OpenGroupRequest& request, Group* group,
                                   std::vector<uint64_t>* released) {
  const uint64_t number = request.generation();
  const bool again = group->generation.Is(number, request.opener());
  if (again && group->kept.ended()) return CheckNotOver(*group, request.group(), number);
  if (request.finished() && !again) {
    return GroupError(absl::StatusCode::kAborted, request.group(), "generation ", number,
                      " is over; it cannot finish");
  }
  RETURN_IF_ERROR(Annotate(group->generation.Open(number, request.opener()),
                           absl::StrCat("group '", request.group(), "'")));
  group->touched = SteadyNow();
  if (again) {
    if (request.finished()) group->kept.set_finished(true);
    return absl::OkStatus();
  }
  group->kept.set_ended(false);
  group->kept.set_finished(false);
  group->kept.set_size(request.size());
  group->kept.set_step_timeout_ms(request.step_timeout_ms());
  const bool complete = group->waiting.number >= 0 && group->waiting.update.complete();
  if (!complete) Drop(group, released);
  return absl::OkStatus();
}

internal::v1::OpenGroupResponse GroupSteps::Describe(const internal::v1::OpenGroupRequest& request,
                                                     const Group* group) const {
  internal::v1::OpenGroupResponse response;
  response.set_staged_step(-1);
  response.set_generation(group == nullptr ? GroupGeneration(forgotten_generation_).Newest()
                                           : group->generation.Newest());
  if (group != nullptr) {
    response.set_here(true);
    response.set_known(group->kept.known());
    response.set_next_step(group->kept.next_step());
    response.set_made_generation(group->kept.made_generation());
    const Step& waiting = group->waiting;
    const bool leftover = request.generation() == 0 || waiting.generation != request.generation();
    if (leftover && waiting.number >= 0 && waiting.update.complete()) {
      response.set_staged_step(waiting.number);
    }
  }
  for (int rank = 0; rank < request.ranks(); ++rank) {
    const auto found =
        groups_.find(Key(request.model_id(), absl::StrCat(RankPrefix(request.group()), rank)));
    if (found == groups_.end()) continue;
    internal::v1::RankProgress* to = response.add_ranks();
    to->set_rank(rank);
    to->set_next_step(found->second.kept.next_step());
    to->set_finished(found->second.kept.finished());
  }
  return response;
}

absl::Status GroupSteps::MakeRoom() {
  if (static_cast<int>(groups_.size()) < options_.max_groups) return absl::OkStatus();
  const auto may_go = [this](const Group& group) {
    if (group.busy()) return absl::InfiniteFuture();
    return group.touched + std::max(options_.idle, 2 * group.step_timeout());
  };
  const auto first = std::min_element(
      groups_.begin(), groups_.end(),
      [&](const auto& a, const auto& b) { return may_go(a.second) < may_go(b.second); });
  if (may_go(first->second) > SteadyNow()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        groups_.size(), " groups are known here already; at most ", options_.max_groups,
        " are allowed, and none has been idle for ", absl::FormatDuration(options_.idle),
        "; drop groups whose run is over (emberctl group drop)"));
  }
  RETURN_IF_ERROR(log_->Append(ForgottenRecord(first->first.first, first->first.second)));
  NoteForgotten(first->second);
  groups_.erase(first);
  return absl::OkStatus();
}

absl::Status GroupSteps::CheckNotOver(const Group& group, const std::string& name,
                                      uint64_t generation) const {
  const uint64_t newest = group.generation.number();
  if (generation < newest) {
    return GroupError(absl::StatusCode::kAborted, name, "generation ", generation,
                      " is over; the group is in generation ", newest);
  }
  if (generation > newest || !group.kept.ended()) return absl::OkStatus();
  return GroupError(absl::StatusCode::kAborted, name, "generation ", generation,
                    " is over: the gradients of other ranks did not come in time; join again");
}

absl::Status GroupSteps::CheckIsNext(const Group& group, const GroupPart& part) const {
  RETURN_IF_ERROR(CheckNotOver(group, part.group(), part.generation()));
  if (part.generation() > group.generation.number()) {
    return GroupError(absl::StatusCode::kAborted, part.group(), "generation ", part.generation(),
                      " was not opened here");
  }
  if (part.size() != group.kept.size()) {
    return GroupError(absl::StatusCode::kInvalidArgument, part.group(), "size is ", part.size(),
                      ", but the group was opened with size ", group.kept.size());
  }
  if (group.kept.known() && part.step() < group.kept.next_step()) {
    // A step of before the group joined was whole, and a checkpoint that wanted to know made it.
    return GroupError(absl::StatusCode::kAborted, part.group(), "step ", part.step(),
                      " has been applied; join again to go on from step ", group.kept.next_step());
  }
  if (group.kept.known() && part.step() != group.kept.next_step()) {
    return GroupError(absl::StatusCode::kFailedPrecondition, part.group(), "step ", part.step(),
                      " cannot be applied; the next step is ", group.kept.next_step());
  }
  return absl::OkStatus();
}

absl::Status GroupSteps::Place(Group* group, const ApplyCommand& command,
                               std::shared_ptr<const shard::CheckedPart> checked,
                               const internal::v1::LogBlob& blob, std::vector<uint64_t>* released) {
  const GroupPart& part = *command.group_part;
  if (group->waiting.generation != group->generation.number()) Drop(group, released);
  Step& step = group->waiting;
  if (step.number < 0) {
    step.number = part.step();
    step.generation = part.generation();
    step.update = shard::StagedUpdate(part.size());
    step.batch_handles.resize(part.size());
    step.logged.resize(part.size());
  }
  if (step.number != part.step()) {
    return GroupError(absl::StatusCode::kInvalidArgument, part.group(), "rank ", part.rank(),
                      " is at step ", part.step(), ", others at ", step.number);
  }
  if (step.update.Has(part.rank())) {
    return GroupError(absl::StatusCode::kAlreadyExists, part.group(), "rank ", part.rank(),
                      " has already sent its gradients of step ", part.step());
  }
  const int64_t bytes = checked->gradient_bytes();
  if (absl::Status status = step.update.Add(part.rank(), std::move(checked)); !status.ok()) {
    if (step.update.held() == 0) step = Step();  // or others would have to come with its number
    return Annotate(status, absl::StrCat("group '", part.group(), "'"));
  }
  step.batch_handles[part.rank()] = command.batch_handle;
  step.logged[part.rank()] = PartRecord(command.model_id, part, blob).part();
  held_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status GroupSteps::Hold(const ApplyCommand& command,
                              std::shared_ptr<const shard::CheckedPart> checked,
                              const internal::v1::LogBlob& blob) {
  const GroupPart& part = *command.group_part;
  std::vector<uint64_t> released;
  absl::Status status;
  {
    absl::MutexLock lock(&order_->mutex);
    const auto found = groups_.find(Key(command.model_id, part.group()));
    if (found == groups_.end()) {
      return GroupError(absl::StatusCode::kAborted, part.group(),
                        "it is not known here; join again");
    }
    Group& group = found->second;
    status = CheckIsNext(group, part);
    const int64_t bytes = checked->gradient_bytes();
    // A whole step that an earlier generation has left gives way to the first part of this one.
    const bool replaces = group.waiting.generation != group.generation.number();
    const int64_t held = held_bytes_ - (replaces ? group.waiting.update.gradient_bytes() : 0);
    if (status.ok() && held + bytes > options_.max_held_bytes && skips_ == nullptr) {
      status = absl::ResourceExhaustedError(absl::StrCat(
          "the gradients have ", bytes, " bytes in addition to the ", held,
          " that wait for other ranks; budgets.in_flight_bytes is ", options_.max_held_bytes));
    }
    // Parts that do not agree are refused again when the log is read.
    if (status.ok()) status = log_->Append(PartRecord(command.model_id, part, blob));
    if (status.ok()) status = Place(&group, command, std::move(checked), blob, &released);
    group.waiting.touched = group.touched = SteadyNow();
  }
  Release(released);
  return status;
}

bool GroupSteps::AnswerApplied(Group* group, int64_t step, RowsCallback* done) {
  if (!group->kept.known() || step != group->kept.next_step() - 1) return false;
  if (group->kept.applying()) {
    group->waiting_rows->push_back(std::move(*done));
    *done = nullptr;
  }
  return true;
}

GroupSteps::Step GroupSteps::TakeStep(Group* group) {
  Step step = std::exchange(group->waiting, Step());
  group->kept.set_known(true);
  group->kept.set_next_step(step.number + 1);
  group->kept.set_made_generation(step.generation);
  group->kept.set_applying(true);
  group->waiting_rows = std::make_shared<std::vector<RowsCallback>>();
  held_bytes_ -= step.update.gradient_bytes();
  return step;
}

void GroupSteps::Commit(uint64_t model_id, const GroupPart& part, RowsCallback done) {
  internal::v1::DecideStepRequest request;
  SetGroup(model_id, part.group(), &request);
  request.set_generation(part.generation());
  request.set_step(part.step());
  request.set_commit(true);
  Decide(request, std::move(done));
}

void GroupSteps::Decide(const internal::v1::DecideStepRequest& request, RowsCallback done) {
  const Key key(request.model_id(), request.group());
  std::vector<uint64_t> released;
  absl::StatusOr<RowCounts> answer = RowCounts();
  {
    absl::MutexLock lock(&order_->mutex);
    const auto found = groups_.find(key);
    Group* const group = found == groups_.end() ? nullptr : &found->second;
    Step* const waiting = group == nullptr ? nullptr : &group->waiting;
    if (group == nullptr || group->generation.number() != request.generation()) {
      answer = GroupError(absl::StatusCode::kAborted, request.group(), "generation ",
                          request.generation(), " is over here");
    } else if (!request.commit()) {
      if (waiting->number == request.step()) {
        const absl::Status logged = log_->Append(DecidedRecord(request));
        if (logged.ok()) Drop(group, &released);
        if (!logged.ok()) answer = logged;
      }
    } else if (AnswerApplied(group, request.step(), &done)) {
      answer = group->last_rows;
    } else if (waiting->number == request.step() && waiting->update.complete()) {
      const absl::Status logged = log_->AppendChange(key.first, DecidedRecord(request));
      if (logged.ok()) {
        Step step = TakeStep(group);
        group->waiting_rows->push_back(std::exchange(done, nullptr));
        Apply(key, std::move(step), group->waiting_rows);
      } else {
        answer = logged;
      }
    } else {
      answer = GroupError(absl::StatusCode::kFailedPrecondition, request.group(),
                          "not all ranks have sent their gradients of step ", request.step());
    }
  }
  Release(released);
  if (done != nullptr) done(std::move(answer));
}

void GroupSteps::Apply(const Key& key, Step step, const Waiting& waiting) {
  ++order_->changes;
  if (skips_ != nullptr && skips_(key.first)) return;
  if (Mistake("part.applied_twice")) engine_->Apply(step.update, [](const auto&) {});
  engine_->Apply(std::move(step.update),
                 [this, key, waiting, handles = std::move(step.batch_handles)](const auto& result) {
                   Applied(key, waiting, handles, result);
                 });
}

void GroupSteps::Applied(const Key& key, const Waiting& waiting,
                         const std::vector<uint64_t>& handles,
                         const absl::StatusOr<shard::ApplyResult>& result) {
  Release(handles);
  if (!result.ok()) return Finish(key, waiting, result.status());
  hooks_.step_applied(key.first, *result);
  Finish(key, waiting, RowCounts{result->rows_updated, result->rows_skipped});
}

void GroupSteps::Finish(const Key& key, Waiting waiting, const absl::StatusOr<RowCounts>& rows) {
  std::vector<RowsCallback> answered;
  {
    absl::MutexLock lock(&order_->mutex);
    const auto found = groups_.find(key);
    Group* const group = found == groups_.end() ? nullptr : &found->second;
    if (waiting == nullptr && group != nullptr) waiting = group->waiting_rows;
    // Else its model was dropped; the next run of the group may have a step under way.
    if (group != nullptr && group->waiting_rows == waiting) {
      // The decision is in the log: without this record, it says all but the counts.
      log_->Append(StepMadeRecord(key.first, key.second, group->kept.next_step() - 1, rows))
          .IgnoreError();
      group->kept.set_applying(false);
      group->last_rows = rows;
    }
    if (waiting != nullptr) answered.swap(*waiting);
  }
  for (const RowsCallback& done : answered) done(rows);
}

void GroupSteps::Drop(Group* group, std::vector<uint64_t>* released) {
  const Step step = std::exchange(group->waiting, Step());
  for (int rank = 0; rank < step.update.ranks(); ++rank) {
    if (step.update.Has(rank)) released->push_back(step.batch_handles[rank]);
  }
  held_bytes_ -= step.update.gradient_bytes();
}

void GroupSteps::Release(const std::vector<uint64_t>& handles) {
  for (const uint64_t handle : handles) hooks_.release_batch(handle);
}

void GroupSteps::Sweep(absl::Time now) {
  std::vector<uint64_t> released;
  {
    absl::MutexLock lock(&order_->mutex);
    absl::erase_if(groups_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex) {
      Group& group = entry.second;
      const absl::Duration patience = std::max(options_.part_ttl, 2 * group.step_timeout());
      const bool waits = group.waiting.number >= 0 &&
                         (!group.waiting.update.complete() || Mistake("step.expires_whole"));
      if (waits && group.waiting.touched + patience <= now &&
          log_->Append(EndedRecord(entry.first.first, entry.first.second)).ok()) {
        // From now on the generation's words and parts are refused: nobody can take the step for
        // whole because a part had been here.
        Drop(&group, &released);
        group.kept.set_ended(true);
      }
      const bool goes = !group.kept.known() && !group.busy() &&
                        group.touched + options_.idle <= now &&
                        log_->Append(ForgottenRecord(entry.first.first, entry.first.second)).ok();
      if (goes) NoteForgotten(group);
      return goes;
    });
  }
  Release(released);
}

std::function<void()> GroupSteps::DropModel(uint64_t model_id) {
  order_->mutex.AssertHeld();
  std::vector<uint64_t> released;
  std::vector<RowsCallback> waiting;
  absl::erase_if(groups_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex) {
    if (entry.first.first != model_id) return false;
    NoteForgotten(entry.second);
    Drop(&entry.second, &released);
    for (RowsCallback& done : *entry.second.waiting_rows) waiting.push_back(std::move(done));
    entry.second.waiting_rows->clear();
    return true;
  });
  return [this, model_id, released = std::move(released), waiting = std::move(waiting)] {
    Release(released);
    for (const RowsCallback& done : waiting) {
      done(absl::NotFoundError(
          absl::StrCat("model_id ", absl::Hex(model_id, absl::kZeroPad16), " was dropped")));
    }
  };
}

absl::Status GroupSteps::CheckMayGo(const Group& group, const std::string& name) const {
  const auto refuse = [&](const auto&... why) {
    return GroupError(absl::StatusCode::kFailedPrecondition, name, why...);
  };
  if (group.kept.applying())
    return refuse("step ", group.kept.next_step() - 1, " is being applied; try again");
  if (group.waiting.number >= 0 && group.waiting.update.complete()) {
    return refuse("step ", group.waiting.number, " is complete but not decided yet; try again");
  }
  return absl::OkStatus();
}

absl::StatusOr<internal::v1::DropGroupsResponse> GroupSteps::DropGroups(
    const internal::v1::DropGroupsRequest& request) {
  std::vector<uint64_t> released;
  const absl::Cleanup release = [&] { Release(released); };  // of those that went before an error
  internal::v1::DropGroupsResponse response;
  {
    absl::MutexLock lock(&order_->mutex);
    for (const std::string& name : request.groups()) {
      const auto found = groups_.find(Key(request.model_id(), name));
      if (found == groups_.end()) continue;
      RETURN_IF_ERROR(CheckMayGo(found->second, name));
    }
    for (const std::string& name : request.groups()) {
      const auto found = groups_.find(Key(request.model_id(), name));
      if (found == groups_.end()) continue;
      RETURN_IF_ERROR(log_->Append(ForgottenRecord(request.model_id(), name)));
      Drop(&found->second, &released);
      NoteForgotten(found->second);
      groups_.erase(found);
      response.add_dropped(name);
    }
  }
  return response;
}

void GroupSteps::ListHeld(uint64_t model_id, HeldList* held) const {
  absl::MutexLock lock(&order_->mutex);
  for (const auto& [key, group] : groups_) {
    if (key.first != model_id) continue;
    internal::v1::HeldStep* to = held->Add();
    to->set_group(key.second);
    to->set_known(group.kept.known());
    to->set_next_step(group.kept.next_step());
    to->set_making(group.kept.applying());
    to->set_generation(group.generation.number());
    to->set_held_step(group.waiting.number);
    to->set_held_generation(group.waiting.generation);
    to->set_complete(group.waiting.number >= 0 && group.waiting.update.complete());
  }
}

uint64_t GroupSteps::forgotten_generation() const {
  absl::MutexLock lock(&order_->mutex);
  return forgotten_generation_;
}

// What checkpoints and the log keep of the groups on a shard, and how it comes back.

void GroupSteps::Save(uint64_t model_id, internal::v1::ShardState* state) const {
  absl::MutexLock lock(&order_->mutex);
  uint64_t forgotten = forgotten_generation_;
  for (const auto& [key, group] : groups_) {
    if (key.first != model_id) continue;
    if (!group.kept.known()) {
      forgotten = std::max(forgotten, group.generation.number());
      continue;
    }
    internal::v1::GroupState* to = state->add_groups();
    to->set_group(key.second);
    to->set_generation(group.generation.number());
    to->set_size(group.kept.size());
    to->set_next_step(group.kept.next_step());
    to->set_made_generation(group.kept.made_generation());
    to->set_finished(group.kept.finished());
    if (group.last_rows.ok()) SetRowCounts(*group.last_rows, to);
  }
  state->set_forgotten_generation(forgotten);
}

std::set<std::string> GroupSteps::Finished(uint64_t model_id) const {
  std::set<std::string> finished;
  absl::MutexLock lock(&order_->mutex);
  for (const auto& [key, group] : groups_) {
    if (key.first == model_id && group.kept.finished()) finished.insert(key.second);
  }
  return finished;
}

std::function<void()> GroupSteps::Restore(uint64_t model_id, const internal::v1::ShardState& state,
                                          const std::set<std::string>& finished) {
  order_->mutex.AssertHeld();
  std::function<void()> dropped = DropModel(model_id);
  forgotten_generation_ = std::max(forgotten_generation_, state.forgotten_generation());
  for (const internal::v1::GroupState& from : state.groups()) {
    Group& group = groups_[Key(model_id, from.group())];
    group.generation = GroupGeneration(std::max(from.generation(), forgotten_generation_));
    group.kept.set_size(from.size());
    group.kept.set_known(true);
    group.kept.set_next_step(from.next_step());
    group.kept.set_made_generation(from.made_generation());
    group.last_rows = RowCountsOf(from);
    group.kept.set_finished(from.finished());
    group.touched = SteadyNow();
  }
  for (const std::string& name : finished) {
    const auto [found, is_new] = groups_.try_emplace(Key(model_id, name));
    found->second.kept.set_finished(true);
    if (!is_new) continue;
    found->second.kept.set_size(1);
    found->second.generation = GroupGeneration(forgotten_generation_);
    found->second.touched = SteadyNow();
  }
  return dropped;
}

void GroupSteps::Describe(internal::v1::LogState* state) const {
  order_->mutex.AssertHeld();
  state->set_forgotten_generation(forgotten_generation_);
  for (const auto& [key, group] : groups_) {
    internal::v1::LogGroup* to = state->add_groups();
    *to = group.kept;
    SetGroup(key.first, key.second, to);
    to->set_generation(group.generation.number());
    to->set_opener(group.generation.opener());
    SetRowCounts(group.last_rows.value_or(RowCounts()), to);
    for (int rank = 0; rank < group.waiting.update.ranks(); ++rank) {
      if (!group.waiting.update.Has(rank)) continue;
      *to->add_parts() = group.waiting.logged[rank];
      KeepOldestBlob(group.waiting.logged[rank].blob(), state);
    }
  }
}

absl::Status GroupSteps::Remember(const internal::v1::LogState& state, const PartOf& part_of) {
  absl::MutexLock lock(&order_->mutex);
  forgotten_generation_ = state.forgotten_generation();
  for (const internal::v1::LogGroup& from : state.groups()) {
    Group& group = groups_[Key(from.model_id(), from.group())];
    group.kept = from;
    group.kept.clear_parts();
    group.last_rows = RowCountsOf(from);
    group.touched = SteadyNow();
    for (const internal::v1::LogPart& part : from.parts()) {
      ASSIGN_OR_RETURN(const std::shared_ptr<const shard::CheckedPart> checked, part_of(part));
      ApplyCommand command;
      command.model_id = from.model_id();
      command.group_part = part.part();
      // A step that waits may be of the generation before.
      group.generation = GroupGeneration(part.part().generation());
      std::vector<uint64_t> released;
      RETURN_IF_ERROR(Place(&group, command, checked, part.blob(), &released));
    }
    group.waiting.touched = group.touched;
    group.generation = GroupGeneration(from.generation(), from.opener());
  }
  return absl::OkStatus();
}

void GroupSteps::SetReplaying(Skips skips) {
  absl::MutexLock lock(&order_->mutex);
  skips_ = std::move(skips);
}

void GroupSteps::EndGeneration(uint64_t model_id, const std::string& group, bool forget) {
  std::vector<uint64_t> released;
  absl::MutexLock lock(&order_->mutex);
  const auto found = groups_.find(Key(model_id, group));
  if (found == groups_.end()) return;
  Drop(&found->second, &released);
  found->second.kept.set_ended(true);
  if (!forget) return;
  NoteForgotten(found->second);
  groups_.erase(found);
}

}  // namespace emberd::host
