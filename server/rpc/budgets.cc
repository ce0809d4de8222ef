#include "server/rpc/budgets.h"

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
    if (before <= limit - bytes) return absl::OkStatus();
    // Until they are given back, others may be refused because of them.
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

Admission::Admission(const v1::BudgetConfig& budgets)
    : Admission(budgets, MemoryBudget(budgets.in_flight_bytes(), "budgets.in_flight_bytes")) {}

Admission::Admission(const v1::BudgetConfig& budgets, MemoryBudget memory)
    : budget_(std::move(memory)),
      max_client_bytes_(budgets.client_in_flight_bytes()),
      max_client_requests_(budgets.client_requests()) {}

absl::StatusOr<Admission::Grant> Admission::Admit(const std::string& client, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (!left_.empty()) {
    const Clients::iterator one = left_.front();
    left_.pop_front();
    if (!one->second.Idle()) {
      left_.push_back(one);
    } else {
      clients_.erase(one);
    }
  }
  const auto [place, is_new] = clients_.try_emplace(client);
  if (is_new) {
    place->second.budget = MemoryBudget(
        max_client_bytes_, absl::StrCat("client ", client, "'s budgets.client_in_flight_bytes"));
  }
  if (place->second.requests >= max_client_requests_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "client ", client, " has ", place->second.requests,
        " requests in progress already; budgets.client_requests is ", max_client_requests_));
  }
  absl::StatusOr<Room> room = TakeRoom(place->second, bytes, "a request");
  if (!room.ok()) {
    if (is_new) clients_.erase(place);
    return room.status();
  }
  ++place->second.requests;
  ++requests_;
  Grant grant;
  grant.admission_ = this;
  grant.client_ = place;
  grant.room_ = *std::move(room);
  return grant;
}

absl::StatusOr<Admission::Room> Admission::TakeRoom(const Client& client, int64_t bytes,
                                                    absl::string_view what) const {
  Room room;
  ASSIGN_OR_RETURN(room.process, budget_.Take(bytes, what));
  ASSIGN_OR_RETURN(room.client, client.budget.Take(bytes, what));
  return room;
}

int Admission::requests() const {
  absl::MutexLock lock(&mutex_);
  return requests_;
}

Admission::Grant& Admission::Grant::operator=(Grant&& other) noexcept {
  std::swap(admission_, other.admission_);
  std::swap(client_, other.client_);
  std::swap(room_, other.room_);
  return *this;
}

Admission::Grant::~Grant() {
  if (admission_ == nullptr) return;
  room_ = Room();
  absl::MutexLock lock(&admission_->mutex_);
  --admission_->requests_;
  Client& client = client_->second;
  if (--client.requests > 0 || client.left) return;
  if (client.Idle()) {
    admission_->clients_.erase(client_);
  } else {
    client.left = true;
    admission_->left_.push_back(client_);
  }
}

absl::Status Admission::Grant::AddBytes(int64_t bytes) {
  RETURN_IF_ERROR(room_.process.Grow(bytes, "the request"));
  const absl::Status status = room_.client.Grow(bytes, "the request");
  if (!status.ok()) room_.process.Shrink(bytes);
  return status;
}

void Admission::Grant::ReleaseBytes(int64_t bytes) {
  room_.process.Shrink(bytes);
  room_.client.Shrink(bytes);
}

absl::StatusOr<std::shared_ptr<const void>> Admission::Grant::Reserve(int64_t bytes,
                                                                      absl::string_view what) {
  ASSIGN_OR_RETURN(Room room, admission_->TakeRoom(client_->second, bytes, what));
  return std::shared_ptr<const void>(std::make_shared<Room>(std::move(room)));
}

}  // namespace emberd::rpc
