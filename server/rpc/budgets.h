// How much a process takes on at once. A MemoryBudget counts bytes: of requests, of what is made of
// them, and of answers until they are sent. An Admission counts requests and their bytes, of all
// clients and of each; a HandleStore keeps values within a budget. Budgets are promises of whoever
// wrote them; the MemoryGuard of a shard looks at what the machine, or the container, has left, and
// refuses work that would touch new rows when the memory for them is not there.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/machine_memory.h"
#include "base/status.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::rpc {

// Bytes that were taken from a budget. Its destructor gives them back, on any thread, and may run
// after that of the MemoryBudget. Not thread-safe.
class MemoryRoom {
 public:
  MemoryRoom() = default;  // no bytes, of no budget
  MemoryRoom(MemoryRoom&& other) noexcept { *this = std::move(other); }
  MemoryRoom& operator=(MemoryRoom&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MemoryRoom();

  int64_t bytes() const { return bytes_; }
  // As MemoryBudget::Take.
  absl::Status Grow(int64_t bytes, absl::string_view what);
  void Shrink(int64_t bytes);

 private:
  friend class MemoryBudget;
  struct Account;

  std::shared_ptr<Account> account_;
  int64_t bytes_ = 0;
};

// Thread-safe; costs one atomic addition. Copies are of the same budget.
class MemoryBudget {
 public:
  // Counts, and refuses nothing.
  MemoryBudget() : MemoryBudget(std::numeric_limits<int64_t>::max(), "memory") {}
  // `name`: what sets the limit, for errors: "budgets.in_flight_bytes".
  MemoryBudget(int64_t limit, std::string name);

  // RESOURCE_EXHAUSTED says how many bytes `what` ("a request") needs, how many are free, and the
  // limit.
  absl::StatusOr<MemoryRoom> Take(int64_t bytes, absl::string_view what) const;

  int64_t used() const;

 private:
  std::shared_ptr<MemoryRoom::Account> account_;
};

// Admits a request if the process's budget and its client's have room. Thread-safe. Costs one
// short lock a request, and atomic additions for bytes that come later.
class Admission {
 private:
  struct Client {
    int requests = 0;
    MemoryBudget budget;
    bool left = false;  // it is in left_

    bool Idle() const { return requests == 0 && budget.used() == 0; }
  };
  using Clients = std::map<std::string, Client>;
  // The same bytes of the process's budget and of the client's.
  struct Room {
    MemoryRoom process;
    MemoryRoom client;
  };

 public:
  // `budgets` is complete. `memory` is the process's budget, which others may take from as well;
  // without it, the Admission makes one of budgets.in_flight_bytes.
  explicit Admission(const v1::BudgetConfig& budgets);
  Admission(const v1::BudgetConfig& budgets, MemoryBudget memory);

  // What one request holds, given back when it goes. Not thread-safe. The Admission outlives it.
  class Grant {
   public:
    Grant() = default;
    Grant(Grant&& other) noexcept { *this = std::move(other); }
    Grant& operator=(Grant&& other) noexcept;
    ~Grant();

    // RESOURCE_EXHAUSTED with the figures if a budget does not allow it.
    absl::Status AddBytes(int64_t bytes);
    void ReleaseBytes(int64_t bytes);
    // Bytes for what the request produces, `what` in errors. They are given back when the last
    // reference to the result goes, which may be after the grant, and after the Admission.
    absl::StatusOr<std::shared_ptr<const void>> Reserve(int64_t bytes, absl::string_view what);

   private:
    friend class Admission;
    Admission* admission_ = nullptr;
    Clients::iterator client_;
    Room room_;
  };
  // RESOURCE_EXHAUSTED names the budget that is used up, with the figures. `client`: see ClientName
  // in server/security/security.h.
  absl::StatusOr<Grant> Admit(const std::string& client, int64_t bytes);

  int64_t bytes() const { return budget_.used(); }
  int requests() const;

 private:
  absl::StatusOr<Room> TakeRoom(const Client& client, int64_t bytes, absl::string_view what) const;

  const MemoryBudget budget_;
  const int64_t max_client_bytes_;
  const int max_client_requests_;

  mutable absl::Mutex mutex_;
  Clients clients_ ABSL_GUARDED_BY(mutex_);  // those with requests, or with bytes
  // Clients whose requests have ended, but whose answers have bytes yet. Each request looks at one
  // of them, and forgets it if it has none any more.
  std::deque<Clients::iterator> left_ ABSL_GUARDED_BY(mutex_);
  int requests_ ABSL_GUARDED_BY(mutex_) = 0;
};

// For whoever looks every second for things that nobody has used for a long time.
class SweepClock {
 public:
  // How long the process stood still before `now`, so that nobody could use what it keeps: all the
  // time since the last look, where that is longer than kLongestPause, else none.
  absl::Duration Standstill(absl::Time now) {
    const absl::Duration pause = now - std::exchange(last_, now);
    return pause > kLongestPause ? pause : absl::ZeroDuration();
  }

 private:
  static constexpr absl::Duration kLongestPause = absl::Seconds(10);
  absl::Time last_ = absl::InfiniteFuture();  // so that no time has passed before the first look
};

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

  // RESOURCE_EXHAUSTED, with the figures, if the store would be over its budget. UNAVAILABLE if it
  // has the handle: the request was sent twice, and what the first does with its value must not
  // befall that of the second.
  absl::Status Insert(uint64_t handle, std::shared_ptr<T> value, int64_t bytes, absl::Time expiry) {
    absl::MutexLock lock(&mutex_);
    if (entries_.contains(handle)) {
      return absl::UnavailableError(
          absl::StrCat("batch_handle ", handle, " is kept for an earlier request; retry later"));
    }
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

  // Drops what expired and is not claimed; returns the handles. To be called every second: time in
  // which this process stood still does not count.
  std::vector<uint64_t> Sweep(absl::Time now) {
    absl::MutexLock lock(&mutex_);
    const absl::Duration standstill = clock_.Standstill(now);
    std::vector<uint64_t> expired;
    for (auto& [handle, entry] : entries_) {
      entry.expiry += standstill;
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
  SweepClock clock_ ABSL_GUARDED_BY(mutex_);
};

// Asked by a shard before it touches new rows, or loads some. Thread-safe.
class MemoryGuard {
 public:
  using Reader = std::function<MachineMemory()>;
  // `shards` share the memory that `read` gives.
  explicit MemoryGuard(
      int shards, Reader read = [] { return ReadMachineMemory(); });

  // RESOURCE_EXHAUSTED, with the figures, if all shards of the machine cannot take `bytes()` each,
  // beside what earlier calls were promised. The result is such a promise until it goes. A reserve
  // stays free. `most`: what bytes() returns at most; if that fits, bytes() is not called.
  absl::StatusOr<MemoryRoom> Check(int64_t most, absl::FunctionRef<int64_t()> bytes);

  // RESOURCE_EXHAUSTED, with the figures, if all shards of the machine cannot take `bytes` each at
  // the same time, as when they load rows beside those that they serve.
  absl::Status CheckLoad(int64_t bytes);

  // What this shard may count on: its part of the memory.
  int64_t share() const { return limit_ / shards_; }

 private:
  int64_t Available();

  const Reader read_;
  const int shards_;
  const int64_t limit_;
  const int64_t reserve_;  // for everything but rows
  const MemoryBudget promised_;

  absl::Mutex mutex_;
  int64_t available_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time read_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace emberd::rpc
