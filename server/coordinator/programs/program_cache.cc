#include "server/coordinator/programs/program_cache.h"

#include "absl/strings/str_cat.h"
#include "base/steady_time.h"

namespace emberd::server {

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
      ++counts_.found;
      Take(entry.get());
      return Compiled{entry->program, entry->handle, /*cached=*/true};
    }
    place = std::make_shared<Entry>();
    entry = place;
    entry->key = key;
    ++counts_.compiled;
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
  if (entry->newest) {
    newest_.erase(entry->place);
  } else if (entry->references > 1) {
    ++counts_.revived;
  }
  newest_.push_front(entry);
  entry->place = newest_.begin();
  entry->newest = true;
  while (static_cast<int>(newest_.size()) > options_.capacity) {
    Entry* oldest = newest_.back();
    newest_.pop_back();
    oldest->newest = false;
    ++counts_.evicted;
    if (oldest->references == 0) Forget(oldest);
  }
}

void ProgramCache::Forget(Entry* entry) {
  const EntryPtr keeps = by_handle_.at(entry->handle);
  by_handle_.erase(entry->handle);
  const auto found = by_key_.find(entry->key);
  if (found != by_key_.end() && found->second == keeps) by_key_.erase(found);
}

absl::StatusOr<std::shared_ptr<const Program>> ProgramCache::Find(uint64_t handle) {
  absl::MutexLock lock(&mutex_);
  const auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) {
    return absl::NotFoundError(absl::StrCat("No executable found for uid ", handle));
  }
  found->second->used = SteadyNow();
  return found->second->program;
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

ProgramCache::Counts ProgramCache::counts() const {
  absl::MutexLock lock(&mutex_);
  Counts counts = counts_;
  counts.programs = static_cast<int64_t>(by_handle_.size());
  return counts;
}

}  // namespace emberd::server
