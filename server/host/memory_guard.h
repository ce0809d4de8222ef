// Refuses work that would touch new rows when the memory for them is not there. Budgets are
// promises of whoever wrote them; this looks at what the machine, or the container, has left.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/machine_memory.h"
#include "base/mutex.h"
#include "server/rpc/budgets.h"

namespace emberd::host {

// Thread-safe.
class MemoryGuard {
 public:
  using Reader = std::function<MachineMemory()>;
  // `shards` share the memory that `read` gives.
  explicit MemoryGuard(
      int shards, Reader read = [] { return ReadMachineMemory(); });

  // RESOURCE_EXHAUSTED, with the figures, if all shards of the machine cannot take `bytes()` each,
  // beside what others were told that they may take and have not yet: until the result goes, this
  // is. A reserve stays free. `most`: bytes() at most; where that fits, bytes() is not called.
  absl::StatusOr<rpc::MemoryRoom> Check(int64_t most, absl::FunctionRef<int64_t()> bytes);

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
  const rpc::MemoryBudget promised_;

  Mutex mutex_;
  int64_t available_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time read_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace emberd::host
