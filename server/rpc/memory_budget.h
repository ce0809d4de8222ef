// A budget of bytes for what a process has taken on and not done with: what came, what was made of
// it, and what is on its way out.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace emberd::rpc {

// Bytes taken from a budget, given back when it goes, on any thread. May outlive the MemoryBudget.
// Not thread-safe.
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

}  // namespace emberd::rpc
