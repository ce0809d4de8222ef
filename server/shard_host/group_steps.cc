#include "server/shard_host/group_steps.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::server {
namespace {

int64_t GradientBytes(const shard::ApplyInput& input) {
  int64_t bytes = 0;
  for (const shard::StackGradients& stack : input.stacks) {
    bytes += static_cast<int64_t>(stack.gradients.size() * sizeof(float));
  }
  return bytes;
}

const shard::StackGradients* FindStack(const shard::ApplyInput& input, int stack) {
  for (const shard::StackGradients& gradients : input.stacks) {
    if (gradients.stack == stack) return &gradients;
  }
  return nullptr;
}

// One update has one step number and one set of hyper-parameters, whichever rank sends them.
absl::Status CheckAgreement(const ApplyCommand& first, const ApplyCommand& second) {
  const int first_rank = first.group_part->rank;
  const int second_rank = second.group_part->rank;
  if (first.input.step != second.input.step) {
    return absl::InvalidArgumentError(absl::StrCat("step is ", second.input.step, " from rank ",
                                                   second_rank, " and ", first.input.step,
                                                   " from rank ", first_rank));
  }
  for (const shard::StackGradients& stack : second.input.stacks) {
    const shard::StackGradients* other = FindStack(first.input, stack.stack);
    if (other == nullptr || other->hyperparameters == stack.hyperparameters) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("hyperparameters of stack ", stack.stack, " differ between ranks ", first_rank,
                     " and ", second_rank, ": every rank of a group sends the same"));
  }
  return absl::OkStatus();
}

std::string Named(const std::string& group) { return absl::StrCat("group '", group, "': "); }

}  // namespace

GroupSteps::GroupSteps(Options options, shard::Engine* engine, Hooks hooks)
    : options_(options), engine_(engine), hooks_(std::move(hooks)) {}

absl::StatusOr<internal::v1::OpenGroupResponse> GroupSteps::Open(
    const internal::v1::OpenGroupRequest& request) {
  if (request.group().empty() || request.generation() == 0 || request.size() < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("group '", request.group(), "' of size ", request.size(), " in generation ",
                     request.generation(), ": it needs a name, a rank and a generation"));
  }
  std::vector<uint64_t> released;
  internal::v1::OpenGroupResponse response;
  {
    absl::MutexLock lock(&mutex_);
    const Key key(request.model_id(), request.group());
    if (!groups_.contains(key) && static_cast<int>(groups_.size()) >= options_.max_groups) {
      return absl::ResourceExhaustedError(
          absl::StrCat(groups_.size(), " groups are known here, and no more than that can be"));
    }
    Group& group = groups_[key];
    if (request.generation() < group.generation) {
      return absl::AbortedError(absl::StrCat(Named(request.group()), "generation ",
                                             request.generation(), " is over; it is at ",
                                             group.generation));
    }
    if (request.generation() > group.generation) {
      group.generation = request.generation();
      group.size = request.size();
      const bool complete = group.waiting.number >= 0 &&
                            group.waiting.held == static_cast<int>(group.waiting.parts.size());
      if (!complete) Drop(&group, &released);
    }
    group.touched = absl::Now();
    response.set_known(group.known);
    response.set_next_step(group.next_step);
    const bool leftover = group.waiting.number >= 0 && group.waiting.generation != group.generation;
    response.set_staged_step(leftover ? group.waiting.number : -1);
  }
  Release(released);
  return response;
}

absl::Status GroupSteps::CheckTurn(const Group& group, const GroupPart& part) const {
  if (part.generation != group.generation) {
    return absl::AbortedError(absl::StrCat(Named(part.group), "generation ", part.generation,
                                           " is over; it is at ", group.generation));
  }
  if (part.size != group.size) {
    return absl::InvalidArgumentError(absl::StrCat(Named(part.group), "size is ", part.size,
                                                   ", but it was opened with ", group.size));
  }
  if (group.known && part.step != group.next_step) {
    return absl::FailedPreconditionError(absl::StrCat(Named(part.group), "step ", part.step,
                                                      " cannot be applied; it is the turn of step ",
                                                      group.next_step));
  }
  return absl::OkStatus();
}

absl::Status GroupSteps::Place(Group* group, const ApplyCommand& command,
                               std::shared_ptr<const shard::Batch> batch,
                               std::vector<uint64_t>* released) {
  const GroupPart& part = *command.group_part;
  if (group->waiting.generation != group->generation) Drop(group, released);
  Step& step = group->waiting;
  if (step.number < 0) {
    step.number = part.step;
    step.generation = part.generation;
    step.parts.resize(part.size);
  }
  if (step.number != part.step) {
    return absl::InvalidArgumentError(absl::StrCat(Named(part.group), "rank ", part.rank,
                                                   " is at step ", part.step, ", others at ",
                                                   step.number));
  }
  Part& place = step.parts[part.rank];
  if (place.batch != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(Named(part.group), "the part of rank ", part.rank,
                                                 " of step ", part.step, " is here"));
  }
  for (const Part& other : step.parts) {
    if (other.batch == nullptr) continue;
    if (absl::Status status = CheckAgreement(other.command, command); !status.ok()) return status;
    break;
  }
  if (step.held + 1 == static_cast<int>(step.parts.size())) {
    if (absl::Status status = CheckWhole(step, command, batch); !status.ok()) return status;
  }
  place = {command, std::move(batch), GradientBytes(command.input)};
  ++step.held;
  ++held_parts_;
  held_bytes_ += place.bytes;
  return absl::OkStatus();
}

absl::Status GroupSteps::CheckWhole(const Step& step, const ApplyCommand& command,
                                    const std::shared_ptr<const shard::Batch>& batch) const {
  std::vector<shard::ApplyPart> parts;
  for (const Part& part : step.parts) {
    const bool is_last = part.batch == nullptr;
    parts.push_back({is_last ? batch : part.batch, is_last ? command.input : part.command.input});
  }
  const absl::Status status = engine_->CheckApplyParts(parts);
  return absl::Status(status.code(),
                      absl::StrCat(Named(command.group_part->group), status.message()));
}

absl::Status GroupSteps::Hold(const ApplyCommand& command,
                              std::shared_ptr<const shard::Batch> batch) {
  const GroupPart& part = *command.group_part;
  std::vector<uint64_t> released;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = groups_.find(Key(command.model_id, part.group));
    if (found == groups_.end()) {
      return absl::AbortedError(
          absl::StrCat(Named(part.group),
                       "it is not open here: the shard restarted, and its rows are back at "
                       "their initial values"));
    }
    Group& group = found->second;
    status = CheckTurn(group, part);
    const int64_t bytes = GradientBytes(command.input);
    if (status.ok() && held_bytes_ + bytes > options_.max_held_bytes) {
      status = absl::ResourceExhaustedError(absl::StrCat(
          "a part of ", bytes, " bytes beside the ", held_bytes_,
          " of parts that wait; budgets.in_flight_bytes is ", options_.max_held_bytes));
    }
    if (status.ok()) status = Place(&group, command, std::move(batch), &released);
    group.touched = absl::Now();
    group.waiting.touched = group.touched;
  }
  Release(released);
  return status;
}

bool GroupSteps::AnswerApplied(Group* group, int64_t step, RowsCallback* done) {
  if (!group->known || step != group->next_step - 1) return false;
  if (group->applying) {
    group->waiting_rows.push_back(std::move(*done));
    *done = nullptr;
  }
  return true;
}

std::vector<GroupSteps::Part> GroupSteps::TakeStep(Group* group) {
  std::vector<Part> parts = std::move(group->waiting.parts);
  group->known = true;
  group->next_step = group->waiting.number + 1;
  group->applying = true;
  group->waiting = Step();
  held_parts_ -= static_cast<int64_t>(parts.size());
  for (const Part& part : parts) held_bytes_ -= part.bytes;
  return parts;
}

void GroupSteps::Commit(uint64_t model_id, const GroupPart& part, RowsCallback done) {
  internal::v1::DecideStepRequest request;
  request.set_model_id(model_id);
  request.set_group(part.group);
  request.set_generation(part.generation);
  request.set_step(part.step);
  request.set_commit(true);
  Decide(request, std::move(done));
}

void GroupSteps::Decide(const internal::v1::DecideStepRequest& request, RowsCallback done) {
  const Key key(request.model_id(), request.group());
  std::vector<Part> parts;
  std::vector<uint64_t> released;
  absl::StatusOr<RowCounts> answer = RowCounts();
  {
    absl::MutexLock lock(&mutex_);
    const auto found = groups_.find(key);
    Group* const group = found == groups_.end() ? nullptr : &found->second;
    Step* const waiting = group == nullptr ? nullptr : &group->waiting;
    if (group == nullptr || group->generation != request.generation()) {
      answer = absl::AbortedError(absl::StrCat(Named(request.group()), "generation ",
                                               request.generation(), " is over here"));
    } else if (!request.commit()) {
      if (waiting->number == request.step()) Drop(group, &released);
    } else if (AnswerApplied(group, request.step(), &done)) {
      answer = group->last_rows;
    } else if (waiting->number == request.step() &&
               waiting->held == static_cast<int>(waiting->parts.size())) {
      parts = TakeStep(group);
      group->waiting_rows.push_back(std::exchange(done, nullptr));
    } else {
      answer = absl::FailedPreconditionError(absl::StrCat(
          Named(request.group()), "the parts of step ", request.step(), " are not all here"));
    }
  }
  Release(released);
  if (!parts.empty()) Apply(key, std::move(parts));
  if (done != nullptr) done(std::move(answer));
}

void GroupSteps::Apply(const Key& key, std::vector<Part> parts) {
  std::vector<uint64_t> handles;
  std::vector<shard::ApplyPart> engine_parts;
  for (Part& part : parts) {
    handles.push_back(part.command.batch_handle);
    engine_parts.push_back({std::move(part.batch), std::move(part.command.input)});
  }
  engine_->ApplyParts(std::move(engine_parts), [this, key, handles = std::move(handles)](
                                                   absl::StatusOr<shard::ApplyResult> result) {
    Applied(key, handles, result);
  });
}

void GroupSteps::Applied(const Key& key, const std::vector<uint64_t>& handles,
                         const absl::StatusOr<shard::ApplyResult>& result) {
  Release(handles);
  if (result.ok()) hooks_.step_applied(key.first, *result);
  absl::StatusOr<RowCounts> rows = RowCounts();
  if (result.ok()) {
    *rows = {result->rows_updated, result->rows_skipped};
  } else {
    rows = result.status();
  }
  std::vector<RowsCallback> waiting;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = groups_.find(key);
    if (found == groups_.end()) return;  // its model was dropped, and the callbacks answered
    found->second.applying = false;
    found->second.last_rows = rows;
    waiting.swap(found->second.waiting_rows);
  }
  for (const RowsCallback& done : waiting) done(rows);
}

void GroupSteps::Drop(Group* group, std::vector<uint64_t>* released) {
  for (const Part& part : group->waiting.parts) {
    if (part.batch == nullptr) continue;
    released->push_back(part.command.batch_handle);
    held_bytes_ -= part.bytes;
    --held_parts_;
  }
  group->waiting = Step();
}

void GroupSteps::Release(const std::vector<uint64_t>& handles) {
  for (const uint64_t handle : handles) hooks_.release_batch(handle);
}

void GroupSteps::Sweep(absl::Time now) {
  std::vector<uint64_t> released;
  {
    absl::MutexLock lock(&mutex_);
    absl::erase_if(groups_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      Group& group = entry.second;
      if (group.waiting.number >= 0 && group.waiting.touched + options_.part_ttl <= now) {
        Drop(&group, &released);
      }
      return !group.known && group.waiting.number < 0 && group.touched + options_.part_ttl <= now;
    });
  }
  Release(released);
}

void GroupSteps::DropModel(uint64_t model_id) {
  std::vector<uint64_t> released;
  std::vector<RowsCallback> waiting;
  {
    absl::MutexLock lock(&mutex_);
    absl::erase_if(groups_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (entry.first.first != model_id) return false;
      Drop(&entry.second, &released);
      for (RowsCallback& done : entry.second.waiting_rows) waiting.push_back(std::move(done));
      return true;
    });
  }
  Release(released);
  for (const RowsCallback& done : waiting) {
    done(absl::NotFoundError(absl::StrCat("model_id ", model_id, " was dropped")));
  }
}

int64_t GroupSteps::held_parts() const {
  absl::MutexLock lock(&mutex_);
  return held_parts_;
}

int64_t GroupSteps::held_bytes() const {
  absl::MutexLock lock(&mutex_);
  return held_bytes_;
}

}  // namespace emberd::server
