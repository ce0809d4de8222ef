#include "shard/store/budget.h"

#include "absl/strings/str_cat.h"

namespace emberd::shard {

absl::Status Budget::Take(int64_t bytes) {
  MutexLock lock(&mutex_);
  if (bytes > limit_ - used_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "needs ", bytes, " bytes in every partition; ", used_, " of the budget of ", limit_,
        " (budgets.bytes_per_sparsecore) are in use, so ", bytes - (limit_ - used_),
        " do not fit. Raise the budget if the machines have the memory, add shards, or "
        "store rows in 16 bits"));
  }
  used_ += bytes;
  return absl::OkStatus();
}

void Budget::Return(int64_t bytes) {
  MutexLock lock(&mutex_);
  used_ -= bytes;
}

}  // namespace emberd::shard
