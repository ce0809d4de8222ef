// Values that a server keeps under handles: within a budget, until they expire, for one user at a
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "server/rpc/budgets.h"

namespace emberd::rpc {

struct HandleStoreOptions {
  int64_t max_bytes = 0;  // budgets.batch_bytes
  int64_t max_count = 0;  // budgets.max_batches
};

// Bytes of a budget, given back with the last reference.
using BudgetShare = std::shared_ptr<const MemoryRoom>;

// Thread-safe. Values are shared: one that is erased lives on with whoever still uses it.
template <typename T>
class HandleStore {
 public:
  explicit HandleStore(HandleStoreOptions options) : options_(options) {}

  // RESOURCE_EXHAUSTED, with the figures, if the store would be over its budget.
  absl::Status Insert(uint64_t handle, std::shared_ptr<T> value, int64_t bytes, absl::Time expiry) {
    absl::MutexLock lock(&mutex_);
    if (static_cast<int64_t>(entries_.size()) >= options_.max_count) {
      return absl::ResourceExhaustedError(absl::StrCat(
          entries_.size(), " batches are kept; budgets.max_batches is ", options_.max_count));
    }
    ASSIGN_OR_RETURN(MemoryRoom room, budget_.Take(bytes, "the batch"));
    entries_[handle] = Entry{std::move(value), std::move(room), expiry, false};
    return absl::OkStatus();
  }

  // Whether half of the budget would be left with so many bytes more.
  bool HasPlenty(int64_t bytes) const { return this->bytes() + bytes <= options_.max_bytes / 2; }

  // Takes bytes of the budget for something else than the values of the store.
  absl::StatusOr<BudgetShare> Reserve(int64_t bytes) const {
    ASSIGN_OR_RETURN(MemoryRoom room, budget_.Take(bytes, "the value of the handle"));
    return std::make_shared<const MemoryRoom>(std::move(room));
  }

  // The value, for this caller alone until Unclaim or Erase; it does not expire meanwhile.
  // NOT_FOUND for an unknown handle, UNAVAILABLE while somebody else has it.
  absl::StatusOr<std::shared_ptr<T>> Claim(uint64_t handle) {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(handle);
    if (found == entries_.end()) {
      return absl::NotFoundError(absl::StrCat(
          "batch_handle ", handle, " is unknown: never given, applied, released or expired"));
    }
    if (found->second.claimed) {
      return absl::UnavailableError(
          absl::StrCat("batch_handle ", handle, " is in use by another request; retry later"));
    }
    found->second.claimed = true;
    return found->second.value;
  }

  void Unclaim(uint64_t handle) {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(handle);
    if (found != entries_.end()) found->second.claimed = false;
  }

  void Erase(uint64_t handle) {
    absl::MutexLock lock(&mutex_);
    entries_.erase(handle);
  }

  // Expires at `expiry` instead; nothing happens for an unknown handle.
  void Renew(uint64_t handle, absl::Time expiry) {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(handle);
    if (found != entries_.end()) found->second.expiry = expiry;
  }

  // Handles that never expire.
  std::vector<uint64_t> Endless() const {
    absl::MutexLock lock(&mutex_);
    std::vector<uint64_t> handles;
    for (const auto& [handle, entry] : entries_) {
      if (entry.expiry == absl::InfiniteFuture()) handles.push_back(handle);
    }
    return handles;
  }

  // Drops what expired and is not claimed; returns the handles.
  std::vector<uint64_t> Sweep(absl::Time now) {
    absl::MutexLock lock(&mutex_);
    std::vector<uint64_t> expired;
    for (const auto& [handle, entry] : entries_) {
      if (!entry.claimed && entry.expiry <= now) expired.push_back(handle);
    }
    for (uint64_t handle : expired) entries_.erase(handle);
    return expired;
  }

  int64_t count() const {
    absl::MutexLock lock(&mutex_);
    return entries_.size();
  }
  int64_t max_bytes() const { return options_.max_bytes; }
  int64_t bytes() const { return budget_.used(); }

 private:
  struct Entry {
    std::shared_ptr<T> value;
    MemoryRoom room;
    absl::Time expiry;
    bool claimed = false;
  };

  const HandleStoreOptions options_;
  const MemoryBudget budget_{options_.max_bytes, "budgets.batch_bytes"};
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::rpc
