// A model as the engine holds it: its stacks, the memory that they take, and single rows of theirs,
// read and written.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "shard/batch/hot_rows.h"
#include "shard/memory/memory_manager.h"
#include "shard/store/shared_stacks.h"
#include "shard/store/stack_store.h"
#include "shard/types.h"

namespace emberd::shard {

class Model : public Evictable, public std::enable_shared_from_this<Model> {
 public:
  // Takes its memory from `memory`, and the stacks with a resource from `shared`, which may be null
  // if there are none; `alone` as for SharedStacks::Take. No row of its own stacks has its initial
  // value yet.
  static absl::StatusOr<std::shared_ptr<Model>> Create(const ModelSpec& spec,
                                                       const StoreOptions& options,
                                                       std::shared_ptr<MemoryManager> memory,
                                                       SharedStacks* shared = nullptr,
                                                       bool alone = false);
  ~Model() override;

  // Whoever reads or writes rows holds them meanwhile. Errors: MemoryManager::Hold.
  absl::StatusOr<MemoryManager::Use> Hold() const { return memory_->Hold(room_); }
  // MemoryManager::Keep.
  absl::StatusOr<std::shared_ptr<const void>> Keep(int64_t bytes) const {
    return memory_->Keep(room_, bytes);
  }
  // See MemoryManager::DamageOf.
  absl::Status Damage() const { return memory_->DamageOf(*room_); }
  // The rows are there; they may be evicted from now on when nobody holds them.
  void MayEvict();
  // Rows of its own: what it shares stays.
  absl::Status Spill(SpillFile& file) override;
  void DropRows() override;
  absl::Status Fetch(SpillFile& file) override;

  const ModelSpec& spec() const { return spec_; }
  int stack_count() const { return static_cast<int>(stacks_.size()); }
  StackStore& stack(int i) const { return *stacks_[i]; }
  HotRowSketches& hot_rows(int i) const { return *hot_rows_[i]; }
  // Of the stacks that it does not share, in every partition; of all stacks, on this shard.
  int64_t own_bytes_per_partition() const { return own_bytes_per_partition_; }
  int64_t bytes() const { return bytes_per_partition_ * spec_.partition_count; }

  bool shares() const { return !shares_.empty(); }
  // See SharedStacks::Share.
  void OpenShared();
  // What it shares is the others' from now on, and what was staged for it must not be done.
  void Drop();
  bool dropped() const { return dropped_; }

 private:
  Model(const ModelSpec& spec, std::shared_ptr<MemoryManager> memory, int64_t bytes_per_partition,
        int64_t own_bytes_per_partition)
      : spec_(spec),
        memory_(std::move(memory)),
        bytes_per_partition_(bytes_per_partition),
        own_bytes_per_partition_(own_bytes_per_partition) {}

  absl::Status MakeStacks(const StoreOptions& options, SharedStacks* shared, bool alone);

  const ModelSpec spec_;
  std::atomic<bool> dropped_ = false;
  const std::shared_ptr<MemoryManager> memory_;
  std::shared_ptr<MemoryManager::Room> room_;
  const int64_t bytes_per_partition_;
  const int64_t own_bytes_per_partition_;
  std::vector<std::shared_ptr<StackStore>> stacks_;
  std::vector<SharedStacks::Share> shares_;                // of those with a resource
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
