// A model as the engine holds it: its stacks, of its own or shared with other models, the memory
// that they take, which of their rows are looked up most, and single rows, read and written.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "shard/batch/batch.h"
#include "shard/memory/memory_manager.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {

// Single rows. `slot` empty: weights. The leading `columns` columns of each row. `partitions` are
// global numbers.
struct RowSelection {
  uint64_t model_id = 0;
  int stack = 0;
  std::string slot;
  absl::Span<const int32_t> partitions;
  absl::Span<const int64_t> local_rows;
  int columns = 0;
  uint64_t history = 0;  // of the rows, for who keeps several: the engine does not look at it
};

// The rows of a table that gathers read most, as estimated from a sample (HotRowSketches):
// `lookups` is too high by at most `error`, but for the sampling.
struct HotRow {
  int64_t id = 0;  // the table's own
  int64_t lookups = 0;
  int64_t error = 0;
};
struct HotTable {
  std::string model;
  std::string table;
  int64_t lookups = 0;       // of all rows on this shard
  std::vector<HotRow> rows;  // most lookups first
};

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
  // Memory is taken from `options.memory`, where nothing of it is evicted.
  explicit SharedStacks(const EngineOptions& options) : options_(options) {}

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

  const EngineOptions options_;
  absl::Mutex making_
      ABSL_ACQUIRED_BEFORE(mutex_);  // held while a stack is made, which may take long
  mutable absl::Mutex mutex_;        // never held for long
  std::map<std::string, std::shared_ptr<Stack>> stacks_ ABSL_GUARDED_BY(mutex_);  // by resource
};

// ---- Which rows of a stack are looked up most: one sketch for each of its tables, over a sample
// of the entries of all gathers

// The most frequent keys of a stream, in fixed memory: the Space-Saving algorithm (Metwally,
// Agrawal and El Abbadi, 2005) with weights.
//
// With C counters and a total weight of N: every key of weight above N / C has a counter, and a
// counter is too high by at most its `error`, which is at most N / C. As long as there are at most
// C different keys, all counts are exact. Depends on the order of the stream, on nothing else. Not
// thread-safe.
class SpaceSaving {
 public:
  struct Item {
    uint32_t key = 0;
    int64_t count = 0;
    int64_t error = 0;
  };

  explicit SpaceSaving(int counters) : counters_(counters) {}  // >= 1
  SpaceSaving(SpaceSaving&&) = default;  // a copy would have its counters elsewhere

  // `weight` > 0. O(log C).
  void Add(uint32_t key, int64_t weight);

  int64_t total() const { return total_; }
  // At most `count` items, largest counts first, then smallest keys.
  std::vector<Item> Top(int count) const;

 private:
  struct Colder {
    bool operator()(const Item& a, const Item& b) const {
      return a.count != b.count ? a.count < b.count : a.key > b.key;
    }
  };
  using Items = std::set<Item, Colder>;

  const int counters_;
  int64_t total_ = 0;
  Items items_;
  absl::flat_hash_map<uint32_t, Items::iterator> item_of_;  // by key
};

// One in kHotRowSampling entries counts, for kHotRowSampling. It costs about 250 ns, or 0.25 ns an
// entry, of which a gather spends little: it notes the row, and the sketches hear of it later.
inline constexpr int64_t kHotRowSampling = 1024;

// Counters for a table: the tables of a model share 65,536, but each has 128 to 1024.
int HotRowCounters(int tables);

// Thread-safe.
class HotRowSketches {
 public:
  // `store` must outlive it.
  HotRowSketches(const StackStore& store, int counters, int64_t sampling = kHotRowSampling);

  // Distances between the entries that count are random, so that no period of the batches can hide
  // a row, but the same in every run that gathers the same batches in the same order.
  void Sample(const StackEntries& entries);

  // The hottest rows of every table of the stack, at most `count` each; `model` is left empty.
  std::vector<HotTable> Top(int count);

 private:
  int64_t NextDistance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts what was noted, table by table: a sketch at a time stays in the cache.
  void Count(const std::vector<uint32_t>& rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sketches_mutex_);

  const StackStore& store_;
  const int64_t sampling_;

  // Taken once for a gather of the stack, for a moment.
  absl::Mutex mutex_;
  uint64_t distances_ ABSL_GUARDED_BY(mutex_) = 0;  // drawn so far
  int64_t to_next_ ABSL_GUARDED_BY(mutex_);         // entries before the next that counts
  std::vector<uint32_t> noted_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex sketches_mutex_;
  std::vector<SpaceSaving> sketches_ ABSL_GUARDED_BY(sketches_mutex_);  // by table
};

// ---- A model

class Model : public Evictable, public std::enable_shared_from_this<Model> {
 public:
  // Takes its memory from `options.memory`, and the stacks with a resource from `shared`, which may
  // be null if there are none; `alone` as for SharedStacks::Take. No row of its own stacks has its
  // initial value yet.
  static absl::StatusOr<std::shared_ptr<Model>> Create(const ModelSpec& spec,
                                                       const EngineOptions& options,
                                                       SharedStacks* shared = nullptr,
                                                       bool alone = false);
  ~Model() override;

  // Whoever reads or writes rows holds them meanwhile. Errors: MemoryManager::Hold. Of nothing if
  // no model is ever evicted, and so is Keep.
  absl::StatusOr<MemoryManager::Use> Hold() const {
    if (!evicts_) return nullptr;
    return memory_->Hold(room_);
  }
  // MemoryManager::Keep.
  absl::StatusOr<MemoryManager::Use> Keep(int64_t bytes) const {
    if (!evicts_) return nullptr;
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
        evicts_(memory_->evicts()),
        bytes_per_partition_(bytes_per_partition),
        own_bytes_per_partition_(own_bytes_per_partition) {}

  absl::Status MakeStacks(const EngineOptions& options, SharedStacks* shared, bool alone);

  const ModelSpec spec_;
  std::atomic<bool> dropped_ = false;
  const std::shared_ptr<MemoryManager> memory_;
  const bool evicts_;
  std::shared_ptr<MemoryManager::Room> room_;
  const int64_t bytes_per_partition_;
  const int64_t own_bytes_per_partition_;
  std::vector<std::shared_ptr<StackStore>> stacks_;
  std::vector<SharedStacks::Share> shares_;                // of those with a resource
  std::vector<std::unique_ptr<HotRowSketches>> hot_rows_;  // of stacks_
};

// ---- Rows by (partition, local row): checks, and the copy itself.

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
