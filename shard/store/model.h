// A model as the engine holds it: its stacks, what they take from the budget, and single rows of
// theirs, read and written.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "shard/batch/hot_rows.h"
#include "shard/store/stack_store.h"
#include "shard/types.h"

namespace emberd::shard {

// Bytes that one partition may hold over all models. Thread-safe.
class Budget {
 public:
  explicit Budget(int64_t bytes_per_partition) : limit_(bytes_per_partition) {}
  // RESOURCE_EXHAUSTED, with the figures, if `bytes` more do not fit.
  absl::Status Take(int64_t bytes);
  void Return(int64_t bytes);

 private:
  const int64_t limit_;
  Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Model {
 public:
  // Takes its memory from the budget; no row has its initial value yet.
  static absl::StatusOr<std::shared_ptr<Model>> Create(const ModelSpec& spec,
                                                       const StoreOptions& options,
                                                       std::shared_ptr<Budget> budget);
  ~Model() { budget_->Return(bytes_per_partition_); }

  const ModelSpec& spec() const { return spec_; }
  int stack_count() const { return static_cast<int>(stacks_.size()); }
  StackStore& stack(int i) const { return *stacks_[i]; }
  HotRowSketches& hot_rows(int i) const { return *hot_rows_[i]; }
  int64_t bytes_per_partition() const { return bytes_per_partition_; }
  int64_t bytes() const { return bytes_per_partition_ * spec_.partition_count; }

 private:
  Model(const ModelSpec& spec, std::shared_ptr<Budget> budget, int64_t bytes_per_partition)
      : spec_(spec), budget_(std::move(budget)), bytes_per_partition_(bytes_per_partition) {}

  const ModelSpec spec_;
  const std::shared_ptr<Budget> budget_;
  const int64_t bytes_per_partition_;
  std::vector<std::unique_ptr<StackStore>> stacks_;
  std::vector<std::unique_ptr<HotRowSketches>> hot_rows_;  // of stacks_
};

// --- Rows by (partition, local row): checks, and the copy itself.

// A selection resolved against its stack.
struct RowTarget {
  StackStore* store = nullptr;
  const StackStore::Slot* slot = nullptr;  // null: weights
  std::vector<int64_t> rows;               // as StackStore numbers them
  std::vector<Strand*> strands;            // of the partitions named
  int columns = 0;
};

// INVALID_ARGUMENT or OUT_OF_RANGE names what does not fit. `value_count` is what the caller's
// buffer holds; for writing, padding columns are refused.
absl::StatusOr<RowTarget> ResolveRows(const Model& model, const RowSelection& selection,
                                      size_t value_count, bool writing);

// Rows [begin, end) of the target; the caller holds its strands.
void CopyRowsOut(const RowTarget& target, int64_t begin, int64_t end, float* values);
void CopyRowsIn(const RowTarget& target, int64_t begin, int64_t end, const float* values);

}  // namespace emberd::shard
