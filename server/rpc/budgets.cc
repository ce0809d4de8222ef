#include "server/rpc/budgets.h"

#include <algorithm>
#include <atomic>

#include "base/steady_time.h"

namespace emberd::rpc {
namespace {

constexpr int64_t kMinReserve = int64_t{64} << 20;
constexpr int64_t kMaxReserve = int64_t{1} << 30;
// Rows cannot fill the reserve in this time.
constexpr absl::Duration kMaxAge = absl::Milliseconds(5);

}  // namespace

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

MemoryGuard::MemoryGuard(int shards, Reader read)
    : read_(std::move(read)),
      shards_(std::max(1, shards)),
      limit_(read_().limit),
      reserve_(std::clamp(limit_ / 16, kMinReserve, kMaxReserve)) {}

int64_t MemoryGuard::Available() {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = SteadyNow();
  if (now - read_at_ >= kMaxAge) {
    available_ = read_().available;
    read_at_ = now;
  }
  return available_;
}

absl::StatusOr<MemoryRoom> MemoryGuard::Check(int64_t most, absl::FunctionRef<int64_t()> bytes) {
  if (most <= 0 || limit_ == 0) return MemoryRoom();
  const int64_t available = Available() - promised_.used() * shards_;
  if (available - reserve_ >= most * shards_) return MemoryRoom();
  const int64_t needed = bytes();
  if (needed == 0) return MemoryRoom();
  if (available - reserve_ >= needed * shards_) return promised_.Take(needed, "rows");
  return absl::ResourceExhaustedError(absl::StrCat(
      "the rows that this touches for the first time need ", needed, " bytes on each of ", shards_,
      " shards of this machine; ", std::max<int64_t>(available, 0), " of ", limit_,
      " bytes of memory are left, of which ", reserve_,
      " are kept free. Rows that were touched before are still served. Give the process more "
      "memory, add shards, or store rows in 16 bits"));
}

absl::Status MemoryGuard::CheckLoad(int64_t bytes) {
  if (limit_ == 0) return absl::OkStatus();
  const int64_t available = Available();
  if (available - reserve_ >= bytes * shards_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the rows to be loaded need ", bytes, " bytes on each of ", shards_,
      " shards of this machine, in addition to what they serve; ", available, " of ", limit_,
      " bytes of memory are left, of which ", reserve_,
      " are kept free. Give the process more memory, add shards, store rows in 16 bits, or drop "
      "what is served before"));
}

}  // namespace emberd::rpc
