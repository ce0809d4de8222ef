#include "server/host/memory_guard.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/steady_time.h"

namespace emberd::host {
namespace {

constexpr int64_t kMinReserve = int64_t{64} << 20;
constexpr int64_t kMaxReserve = int64_t{1} << 30;
// Rows cannot fill the reserve in this time.
constexpr absl::Duration kMaxAge = absl::Milliseconds(5);

}  // namespace

MemoryGuard::MemoryGuard(int shards, Reader read)
    : read_(std::move(read)),
      shards_(std::max(1, shards)),
      limit_(read_().limit),
      reserve_(std::clamp(limit_ / 16, kMinReserve, kMaxReserve)) {}

int64_t MemoryGuard::Available() {
  MutexLock lock(&mutex_);
  const absl::Time now = SteadyNow();
  if (now - read_at_ >= kMaxAge) {
    available_ = read_().available;
    read_at_ = now;
  }
  return available_;
}

absl::StatusOr<rpc::MemoryRoom> MemoryGuard::Check(int64_t most,
                                                   absl::FunctionRef<int64_t()> bytes) {
  if (most <= 0 || limit_ == 0) return rpc::MemoryRoom();
  const int64_t available = Available() - promised_.used() * shards_;
  if (available - reserve_ >= most * shards_) return rpc::MemoryRoom();
  const int64_t needed = bytes();
  if (needed == 0) return rpc::MemoryRoom();
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

}  // namespace emberd::host
