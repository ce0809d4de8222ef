#include "server/coordinator/programs/handles.h"

#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/steady_time.h"

namespace emberd::server {
namespace {

constexpr int kOwnerBits = 12;

absl::Status NoHandle(uint64_t handle) {
  return absl::NotFoundError(absl::StrCat("memory handle not found: ", handle));
}

}  // namespace

uint64_t NewHandle(int coordinator) {
  thread_local absl::BitGen generator;
  constexpr int kRandomBits = 64 - kOwnerBits;
  const auto owner = static_cast<uint64_t>(coordinator + 1) & ((uint64_t{1} << kOwnerBits) - 1);
  return owner << kRandomBits | absl::Uniform<uint64_t>(generator, 1, uint64_t{1} << kRandomBits);
}

Handles::~Handles() {
  absl::MutexLock lock(&mutex_);
  for (auto& [handle, entry] : entries_) {
    if (entry.value->looked_up != nullptr) entry.value->looked_up->LeaveToShards();
  }
}

uint64_t Handles::Insert(const std::string& client, ValuePtr value) {
  absl::MutexLock lock(&mutex_);
  heard_[client] = SteadyNow();
  while (true) {
    const uint64_t handle = NewHandle(coordinator_);
    if (entries_.try_emplace(handle, Entry{client, value}).second) return handle;
  }
}

absl::StatusOr<ValuePtr> Handles::Find(uint64_t handle) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return NoHandle(handle);
  heard_[found->second.client] = SteadyNow();
  return found->second.value;
}

void Handles::Replace(uint64_t handle, ValuePtr value) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(handle);
  if (found != entries_.end()) found->second.value.swap(value);
}

absl::Status Handles::CheckRelease(const std::vector<uint64_t>& handles) const {
  absl::MutexLock lock(&mutex_);
  absl::flat_hash_set<uint64_t> seen;
  for (const uint64_t handle : handles) {
    if (!entries_.contains(handle) || !seen.insert(handle).second) return NoHandle(handle);
  }
  return absl::OkStatus();
}

template <typename Gone>
std::vector<ValuePtr> Handles::Take(const Gone& gone) {
  std::vector<ValuePtr> taken;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto at = entry++;
    if (!gone(at->second.client)) continue;
    taken.push_back(std::move(at->second.value));
    entries_.erase(at);
  }
  return taken;
}

int64_t Handles::Release(const std::vector<uint64_t>& handles) {
  std::vector<ValuePtr> taken;
  absl::MutexLock lock(&mutex_);
  for (const uint64_t handle : handles) {
    const auto found = entries_.find(handle);
    if (found == entries_.end()) continue;
    heard_[found->second.client] = SteadyNow();
    taken.push_back(std::move(found->second.value));
    entries_.erase(found);
  }
  return static_cast<int64_t>(taken.size());
}

int64_t Handles::ReleaseClient(const std::string& client) {
  std::vector<ValuePtr> taken;
  absl::MutexLock lock(&mutex_);
  taken = Take([&](const std::string& owner) { return owner == client; });
  heard_.erase(client);
  return static_cast<int64_t>(taken.size());
}

void Handles::Renew(const std::string& client) {
  absl::MutexLock lock(&mutex_);
  const auto found = heard_.find(client);
  if (found != heard_.end()) found->second = SteadyNow();
}

int64_t Handles::Sweep(absl::Time now) {
  std::vector<ValuePtr> taken;
  absl::MutexLock lock(&mutex_);
  absl::flat_hash_set<std::string> silent;
  for (const auto& [client, heard] : heard_) {
    if (heard + lease_ <= now) silent.insert(client);
  }
  if (silent.empty()) return 0;
  taken = Take([&](const std::string& owner) { return silent.contains(owner); });
  for (const std::string& client : silent) heard_.erase(client);
  return static_cast<int64_t>(taken.size());
}

int64_t Handles::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(entries_.size());
}

}  // namespace emberd::server
