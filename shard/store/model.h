// A model as the engine holds it: its stacks, of its own or shared with other models, the memory
// that they take, and single rows of theirs, read and written.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "shard/batch/hot_rows.h"
#include "shard/memory/memory_manager.h"
#include "shard/store/stack_store.h"
#include "shard/types.h"

namespace emberd::shard {

// Stacks that several models of one shard have in common (StackSpec::resource): their rows and
// slots are here once, with one line of work for each partition, whichever model it comes from.
//
// A stack is made for the first model that takes it, and forgotten when the last one leaves it: who
// takes it then gets new rows. Its memory goes when nobody works on it any more.
//
// Thread-safe.
class SharedStacks : public std::enable_shared_from_this<SharedStacks> {
 private:
  struct Stack;

 public:
  // Memory is taken from `memory`, where nothing of it is evicted.
  SharedStacks(const StoreOptions& options, std::shared_ptr<MemoryManager> memory)
      : options_(options), memory_(std::move(memory)) {}

  // The part that one model has in a stack. Movable.
  class Share {
   public:
    Share(Share&&) = default;
    Share& operator=(Share&&) = delete;
    ~Share() { Leave(); }

    // Lives as long as it is held by anybody.
    std::shared_ptr<StackStore> store() const;
    // The rows are there, and other models may take the stack. Only the model that is alone with it
    // says so.
    void Open();
    // The model goes. Idempotent.
    void Leave();

   private:
    friend class SharedStacks;
    Share(std::shared_ptr<SharedStacks> all, std::shared_ptr<Stack> stack, std::string model)
        : all_(std::move(all)), stack_(std::move(stack)), model_(std::move(model)) {}
    std::shared_ptr<SharedStacks> all_;  // null: it has left
    std::shared_ptr<Stack> stack_;
    std::string model_;
  };

  // `alone`: the rows come from elsewhere. FAILED_PRECONDITION then if other models have the stack;
  // those that want it before Open get UNAVAILABLE. ALREADY_EXISTS names the first difference to
  // the stack that is here. Of several calls at a time, one makes the stack. Other errors:
  // StackStore::Create, and those of memory.
  absl::StatusOr<Share> Take(const ModelSpec& model, const StackSpec& stack, bool alone);

  // Of all stacks, in one partition.
  int64_t bytes_per_partition() const;

 private:
  // Adds the model to a stack that is here. Null: it is not.
  absl::StatusOr<std::shared_ptr<Stack>> Join(const ModelSpec& model, const StackSpec& stack,
                                              bool alone) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Stack>> Make(const ModelSpec& model, const StackSpec& stack) const;

  const StoreOptions options_;
  const std::shared_ptr<MemoryManager> memory_;
  Mutex making_ ABSL_ACQUIRED_BEFORE(mutex_);  // held while a stack is made, which may take long
  mutable Mutex mutex_;                        // never held for long
  std::map<std::string, std::shared_ptr<Stack>> stacks_ ABSL_GUARDED_BY(mutex_);  // by resource
};

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
