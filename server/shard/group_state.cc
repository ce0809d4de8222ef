// What checkpoints and the log keep of the groups on a shard, and how it comes back.

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/steady_time.h"
#include "server/shard/apply_codec.h"
#include "server/shard/group_steps.h"

namespace emberd::server {

void GroupSteps::Save(uint64_t model_id, internal::v1::ShardState* state) const {
  MutexLock lock(&order_->mutex);
  uint64_t forgotten = forgotten_generation_;
  for (const auto& [key, group] : groups_) {
    if (key.first != model_id) continue;
    if (!group.known) {
      forgotten = std::max(forgotten, group.generation.number());
      continue;
    }
    internal::v1::GroupState* to = state->add_groups();
    to->set_group(key.second);
    to->set_generation(group.generation.number());
    to->set_size(group.size);
    to->set_next_step(group.next_step);
    to->set_made_generation(group.made_generation);
    to->set_finished(group.finished);
    if (group.last_rows.ok()) SetRowCounts(*group.last_rows, to);
  }
  state->set_forgotten_generation(forgotten);
}

std::set<std::string> GroupSteps::Finished(uint64_t model_id) const {
  std::set<std::string> finished;
  MutexLock lock(&order_->mutex);
  for (const auto& [key, group] : groups_) {
    if (key.first == model_id && group.finished) finished.insert(key.second);
  }
  return finished;
}

void GroupSteps::Restore(uint64_t model_id, const internal::v1::ShardState& state,
                         const std::set<std::string>& finished) {
  DropModel(model_id);
  MutexLock lock(&order_->mutex);
  forgotten_generation_ = std::max(forgotten_generation_, state.forgotten_generation());
  for (const internal::v1::GroupState& from : state.groups()) {
    Group& group = groups_[Key(model_id, from.group())];
    group.generation = GroupGeneration(std::max(from.generation(), forgotten_generation_));
    group.size = from.size();
    group.known = true;
    group.next_step = from.next_step();
    group.made_generation = from.made_generation();
    group.last_rows = RowCountsOf(from);
    group.finished = from.finished();
    group.touched = SteadyNow();
  }
  for (const std::string& name : finished) {
    const auto [found, is_new] = groups_.try_emplace(Key(model_id, name));
    found->second.finished = true;
    if (!is_new) continue;
    found->second.generation = GroupGeneration(forgotten_generation_);
    found->second.touched = SteadyNow();
  }
}

void GroupSteps::Describe(internal::v1::LogState* state) const {
  order_->mutex.AssumeHeld();
  state->set_forgotten_generation(forgotten_generation_);
  for (const auto& [key, group] : groups_) {
    internal::v1::LogGroup* to = state->add_groups();
    to->set_model_id(key.first);
    to->set_group(key.second);
    to->set_generation(group.generation.number());
    to->set_opener(group.generation.opener());
    to->set_size(group.size);
    to->set_ended(group.ended);
    to->set_finished(group.finished);
    to->set_step_timeout_ms(absl::ToInt64Milliseconds(group.step_timeout));
    to->set_known(group.known);
    to->set_next_step(group.next_step);
    to->set_made_generation(group.made_generation);
    to->set_applying(group.applying);
    if (group.last_rows.ok()) SetRowCounts(*group.last_rows, to);
    for (int rank = 0; rank < group.waiting.update.ranks(); ++rank) {
      if (!group.waiting.update.Has(rank)) continue;
      *to->add_parts() = group.waiting.logged[rank];
      KeepOldestBlob(group.waiting.logged[rank].blob(), state);
    }
  }
}

absl::Status GroupSteps::Remember(const internal::v1::LogState& state, const PartOf& part_of) {
  MutexLock lock(&order_->mutex);
  forgotten_generation_ = state.forgotten_generation();
  for (const internal::v1::LogGroup& from : state.groups()) {
    Group& group = groups_[Key(from.model_id(), from.group())];
    group.size = from.size();
    group.ended = from.ended();
    group.finished = from.finished();
    group.step_timeout = absl::Milliseconds(from.step_timeout_ms());
    group.known = from.known();
    group.next_step = from.next_step();
    group.made_generation = from.made_generation();
    group.applying = from.applying();
    group.last_rows = RowCountsOf(from);
    group.touched = SteadyNow();
    for (const internal::v1::LogPart& part : from.parts()) {
      ASSIGN_OR_RETURN(const std::shared_ptr<const shard::CheckedPart> checked, part_of(part));
      ApplyCommand command;
      command.model_id = from.model_id();
      command.group_part = GroupPartOf(part.part());
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
  MutexLock lock(&order_->mutex);
  skips_ = std::move(skips);
}

void GroupSteps::EndGeneration(uint64_t model_id, const std::string& group) {
  std::vector<uint64_t> released;
  MutexLock lock(&order_->mutex);
  const auto found = groups_.find(Key(model_id, group));
  if (found == groups_.end()) return;
  Drop(&found->second, &released);
  found->second.ended = true;
}

void GroupSteps::Forget(uint64_t model_id, const std::string& group) {
  std::vector<uint64_t> released;
  MutexLock lock(&order_->mutex);
  const auto found = groups_.find(Key(model_id, group));
  if (found == groups_.end()) return;
  Drop(&found->second, &released);
  NoteForgotten(found->second);
  groups_.erase(found);
}

}  // namespace emberd::server
