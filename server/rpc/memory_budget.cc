#include "server/rpc/memory_budget.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::rpc {

struct MemoryRoom::Account {
  const int64_t limit;
  const std::string name;
  std::atomic<int64_t> used{0};

  absl::Status Take(int64_t bytes, absl::string_view what) {
    const int64_t before = used.fetch_add(bytes, std::memory_order_relaxed);
    // Others may be refused for what is given back here: then both were about to fill it.
    if (before <= limit - bytes) return absl::OkStatus();
    used.fetch_sub(bytes, std::memory_order_relaxed);
    const int64_t free = std::max<int64_t>(limit - before, 0);
    return absl::ResourceExhaustedError(
        absl::StrCat(what, " needs ", bytes, " bytes; ", free, " of ", name, " = ", limit,
                     " are free; ", bytes > limit ? "ask for less" : "retry later"));
  }
};

MemoryRoom::~MemoryRoom() {
  if (account_ != nullptr) account_->used.fetch_sub(bytes_, std::memory_order_relaxed);
}

absl::Status MemoryRoom::Grow(int64_t bytes, absl::string_view what) {
  if (account_ == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(account_->Take(bytes, what));
  bytes_ += bytes;
  return absl::OkStatus();
}

void MemoryRoom::Shrink(int64_t bytes) {
  if (account_ == nullptr) return;
  bytes = std::min(bytes, bytes_);
  account_->used.fetch_sub(bytes, std::memory_order_relaxed);
  bytes_ -= bytes;
}

MemoryBudget::MemoryBudget(int64_t limit, std::string name)
    : account_(new MemoryRoom::Account{limit, std::move(name)}) {}

absl::StatusOr<MemoryRoom> MemoryBudget::Take(int64_t bytes, absl::string_view what) const {
  RETURN_IF_ERROR(account_->Take(bytes, what));
  MemoryRoom room;
  room.account_ = account_;
  room.bytes_ = bytes;
  return room;
}

int64_t MemoryBudget::used() const { return account_->used.load(std::memory_order_relaxed); }

}  // namespace emberd::rpc
