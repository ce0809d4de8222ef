#include "server/coordinator/programs/program_cache.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator/programs/program_spec.h"

namespace emberd::coordinator {

absl::StatusOr<ProgramPtr> Program::Compile(v1::ProgramSpec spec, const std::string& key,
                                            const step::ServedModelPtr& model, CpuPool* cpu) {
  std::shared_ptr<Program> program(new Program());
  program->cpu_ = cpu;
  v1::CompileResponse& info = program->info_;
  info.set_fingerprint(key);
  *info.mutable_spec() = std::move(spec);
  if (model == nullptr) return program;
  info.set_model_id(model->id);
  program->plan_fingerprint_ = model->plan.fingerprint;
  if (program->kind() != v1::ProgramSpec::LOOKUP) return program;
  RETURN_IF_ERROR(SizeBuffers(*model, &info));
  RETURN_IF_ERROR(program->ModelFor(model).status());
  return program;
}

absl::StatusOr<step::ServedModelPtr> Program::ModelFor(const step::ServedModelPtr& now) const {
  if (now->id != info_.model_id() || now->plan.fingerprint != plan_fingerprint_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the plan of model '", now->config.name(),
                     "' has changed since the program was compiled; compile it again"));
  }
  if (kind() != v1::ProgramSpec::LOOKUP) return now;
  absl::MutexLock lock(&mutex_);
  // The rows of a model that was reset are others; its plan is the same.
  if (model_ == nullptr || model_->history != now->history) model_ = WithLimits(*now);
  return model_;
}

step::ServedModelPtr Program::WithLimits(const step::ServedModel& model) const {
  auto limited = std::make_shared<step::ServedModel>(model);
  limited->config.mutable_plan()->set_allow_id_dropping(spec().allow_id_dropping());
  for (size_t k = 0; k < limited->plan.stacks.size(); ++k) {
    const v1::StackProgram& program = info_.stacks(static_cast<int>(k));
    preprocess::StackPlan& stack = limited->plan.stacks[k];
    stack.limits = {program.limits().max_ids_per_partition(),
                    program.limits().max_unique_ids_per_partition(),
                    spec().max_ids_per_chip_per_sample(), spec().max_minibatches_per_sparsecore()};
    stack.samples = program.samples();
  }
  limited->preprocessor = std::make_shared<preprocess::Preprocessor>(
      &limited->config, &limited->plan, cpu_, model.preprocessor.get());
  return limited;
}

absl::StatusOr<ProgramCache::Compiled> ProgramCache::Compile(const std::string& key,
                                                             const Factory& factory) {
  EntryPtr entry;
  {
    absl::MutexLock lock(&mutex_);
    EntryPtr& place = by_key_[key];
    if (place != nullptr) {
      entry = place;
      while (!entry->done) done_.Wait(&mutex_);
      if (!entry->status.ok()) return entry->status;
      // It may have been forgotten since it was done.
      by_key_.try_emplace(key, entry);
      by_handle_.try_emplace(entry->handle, entry);
      Take(entry.get());
      return Compiled{entry->program, entry->handle, /*cached=*/true};
    }
    place = std::make_shared<Entry>();
    entry = place;
    entry->key = key;
  }
  auto program = factory();
  absl::MutexLock lock(&mutex_);
  entry->done = true;
  entry->status = program.status();
  done_.SignalAll();
  if (!program.ok()) {
    by_key_.erase(key);  // the next call tries again
    return program.status();
  }
  entry->program = *std::move(program);
  entry->handle = options_.new_handle();
  by_handle_[entry->handle] = entry;
  Take(entry.get());
  return Compiled{entry->program, entry->handle, /*cached=*/false};
}

void ProgramCache::Take(Entry* entry) {
  ++entry->references;
  entry->used = SteadyNow();
  if (entry->newest) newest_.erase(entry->place);
  newest_.push_front(entry);
  entry->place = newest_.begin();
  entry->newest = true;
  while (static_cast<int>(newest_.size()) > options_.capacity) {
    Entry* oldest = newest_.back();
    newest_.pop_back();
    oldest->newest = false;
    if (oldest->references == 0) Forget(oldest);
  }
}

void ProgramCache::Forget(Entry* entry) {
  const EntryPtr keeps = by_handle_.at(entry->handle);
  by_handle_.erase(entry->handle);
  const auto found = by_key_.find(entry->key);
  if (found != by_key_.end() && found->second == keeps) by_key_.erase(found);
}

absl::StatusOr<ProgramPtr> ProgramCache::Find(uint64_t handle) {
  absl::MutexLock lock(&mutex_);
  const auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) {
    return absl::NotFoundError(absl::StrCat("No executable found for uid ", handle));
  }
  found->second->used = SteadyNow();
  return found->second->program;
}

absl::StatusOr<ProgramPtr> ProgramCache::Find(uint64_t handle, Handles* handles) {
  if (const auto own = handles->Find(handle); own.ok() && (*own)->program != nullptr) {
    return (*own)->program;
  }
  return Find(handle);
}

absl::Status ProgramCache::CheckReleaseLocked(const std::vector<uint64_t>& handles) const {
  absl::flat_hash_map<uint64_t, int64_t> wanted;
  for (const uint64_t handle : handles) {
    const auto found = by_handle_.find(handle);
    if (found == by_handle_.end() || ++wanted[handle] > found->second->references) {
      return absl::NotFoundError(absl::StrCat("No cache entry found for uid ", handle));
    }
  }
  return absl::OkStatus();
}

absl::Status ProgramCache::CheckRelease(const std::vector<uint64_t>& handles) {
  absl::MutexLock lock(&mutex_);
  return CheckReleaseLocked(handles);
}

absl::Status ProgramCache::Release(const std::vector<uint64_t>& handles) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckReleaseLocked(handles); !status.ok()) return status;
  for (const uint64_t handle : handles) {
    Entry* entry = by_handle_.at(handle).get();
    if (--entry->references == 0 && !entry->newest) Forget(entry);
  }
  return absl::OkStatus();
}

void ProgramCache::Sweep(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  std::vector<Entry*> unused;
  for (const auto& [handle, entry] : by_handle_) {
    if (!entry->newest && entry->used + options_.lease <= now) unused.push_back(entry.get());
  }
  for (Entry* entry : unused) Forget(entry);
}

}  // namespace emberd::coordinator
