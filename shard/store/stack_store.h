// The rows of one stack that this shard owns: weights and optimizer slots of K partitions, and how
// they begin.
//
// A row is named by `row = k * rows_per_partition + local row`, k counting the shard's own
// partitions from 0. Weights and each slot are arrays of their own, [K * rows_per_partition,
// columns].
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/mutex.h"
#include "base/thread_pools.h"
#include "config/optimizers.h"
#include "shard/kernel_types.h"
#include "shard/snapshot/row_changes.h"
#include "shard/store/initializer.h"
#include "shard/types.h"

namespace emberd::shard {

class SpillFile;

struct StoreOptions {
  // Stacks of at most this many bytes get all their rows at once; larger ones row by row when first
  // touched.
  int64_t eager_bytes = int64_t{64} << 20;
  // Arrays of at most this many bytes are backed by huge pages: faster, but the first touch costs 2
  // MiB.
  int64_t huge_page_bytes = int64_t{1} << 40;
};

// The first values.size() columns of a row of weights as it is stored: float32, bfloat16 or
// float16. Plain loops, for what is not a kernel.
void WriteStoredRow(v1::DataType dtype, absl::Span<const float> values, char* row);
void ReadStoredRow(v1::DataType dtype, const char* row, absl::Span<float> values);

// Thread-safe as far as it guards anything: EnsureRow may be called by any thread; who reads or
// writes a row of partition k must hold strand(k).
class StackStore {
 public:
  struct Slot {
    config::SlotInfo info;
    int columns = 0;  // width, or 1
    MappedMemory memory;
    float* data() const { return reinterpret_cast<float*>(memory.data()); }
  };

  // INVALID_ARGUMENT for a width, row count or storage type that no shard can hold.
  static absl::Status CheckShape(const StackSpec& spec, int partitions);
  // INVALID_ARGUMENT for a spec that makes no sense. Bytes are not checked against a budget here.
  // No row has its initial value yet: see FillIfSmall.
  static absl::StatusOr<std::unique_ptr<StackStore>> Create(const ModelSpec& model,
                                                            const StackSpec& spec,
                                                            const StoreOptions& options);
  // Bytes of weights and slots in one partition.
  static int64_t BytesPerPartition(const StackSpec& spec);

  const StackSpec& spec() const { return spec_; }
  int width() const { return spec_.embedding_dim; }
  int partitions() const { return partitions_; }
  int first_partition() const { return first_partition_; }
  int64_t rows_per_partition() const { return spec_.rows_per_partition; }
  int64_t rows() const { return partitions_ * spec_.rows_per_partition; }
  v1::DataType dtype() const { return spec_.storage_dtype; }
  size_t row_bytes() const { return RowBytes(spec_); }
  // Of the weights and slots of a row.
  int64_t state_bytes() const { return bytes_per_partition_ / spec_.rows_per_partition; }
  char* weights() const { return weights_.data(); }
  const MappedMemory& weights_memory() const { return weights_; }
  const std::vector<Slot>& slots() const { return slots_; }
  // Ascending, without gaps, over all local rows of a partition.
  const std::vector<RowRange>& ranges() const { return ranges_; }
  // The range that `row` is in.
  const RowRange& RangeOf(int64_t row) const;
  // The table's own number of a row that is in the range of a table.
  int64_t IdOf(int64_t row) const;
  Strand& strand(int k) { return strands_[k]; }
  std::vector<Strand*> AllStrands();

  // Local rows [begin, end) of partition k.
  struct LocalRows {
    int64_t begin = 0;
    int64_t end = 0;
  };
  int64_t ChunkOf(int64_t row) const { return row >> chunk_shift_; }
  // The rows of a chunk that are in partition k.
  LocalRows RowsOfChunk(int k, int64_t chunk) const;
  bool ChunkTouched(int64_t chunk) const {
    return Word(chunk).load(std::memory_order_acquire) >> (chunk % 64) & 1;
  }
  RowChanges& changes(int k) { return changes_[k]; }
  // Who writes a row says so before, and before EnsureRow.
  void BeforeWrite(int64_t row) { changes_[row / rows_per_partition()].BeforeWrite(ChunkOf(row)); }

  // Rows from outside, in place of initial values. The store is not in use yet. Local rows from
  // `first` on of partition k: weights as they are stored, or the values of slot `slot`.
  void LoadWeights(int k, int64_t first, absl::Span<const char> rows);
  void LoadSlot(int k, int slot, int64_t first, absl::Span<const float> values);
  // Gives all rows their initial values that have none yet, if the store is small.
  void FillIfSmall(const StoreOptions& options, CpuPool& cpu);

  // The rows that have a value, to and from a file; see Evictable. Nobody uses the store meanwhile.
  absl::Status Spill(SpillFile& file) const;
  void DropRows();
  absl::Status Fetch(SpillFile& file);

  // Changes of earlier epochs are in the rows, and are passed over; see Engine::SetEpoch.
  uint64_t first_epoch() const { return first_epoch_; }
  void set_first_epoch(uint64_t epoch) { first_epoch_ = epoch; }

  int64_t unnumbered_updates() const { return unnumbered_updates_; }
  void set_unnumbered_updates(int64_t updates) { unnumbered_updates_ = updates; }

  // The key of this step's random roundings, from the model's seed, the stack's name and the step:
  // the trainer's step number where it gives one, else the number of this update among those of the
  // stack that gave none. Either is the same for any number of shards, threads and restarts that
  // replay the updates in their order. To be called once per update, in that order. If `rng_seed`
  // is not 0, it takes the place of the model's seed, and the update is not counted.
  uint64_t NextRoundingKey(int64_t step, uint64_t rng_seed);

  // True once every row has its initial value; EnsureRow is then not needed.
  bool Complete() const { return missing_chunks_.load(std::memory_order_acquire) == 0; }
  // Bytes of weights and slots of rows without one.
  int64_t UntouchedBytes() const { return BytesOf(missing_chunks_); }
  // The same of rows that have changed since the newest snapshot that was kept.
  int64_t ChangedBytes() const;
  // Whether any of the rows [begin, end) may have its initial value.
  bool Touched(int64_t begin, int64_t end) const;
  // Whether the rows `first` + each of `local` have their values, which they keep.
  bool AllTouched(int64_t first, absl::Span<const int32_t> local) const;
  // Gives `row` its initial value if nobody has touched it. Whoever returns from this sees the row
  // initialised.
  void EnsureRow(int64_t row) {
    const int64_t chunk = row >> chunk_shift_;
    if (!ChunkTouched(chunk)) InitializeChunk(chunk);
  }

 private:
  StackStore(const ModelSpec& model, const StackSpec& spec);
  absl::Status MakeRanges();
  absl::Status Reserve(const StoreOptions& options);
  void InitializeChunk(int64_t chunk);
  void InitializeRow(int64_t row, const RowRange& range, std::vector<float>& values);
  void InitializeSlots(int64_t row, int columns);
  void SetTouched(int64_t chunk);
  int64_t BytesOf(int64_t chunks) const;
  // The bytes of touched rows, array after array, as runs that are as long as can be.
  absl::Status ForTouchedBytes(absl::FunctionRef<absl::Status(absl::Span<char> bytes)> fn) const;
  std::atomic<uint64_t>& Word(int64_t chunk) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(bitmap_.data())[chunk / 64];
  }

  const StackSpec spec_;
  const int64_t bytes_per_partition_;
  const int partitions_;
  const int all_partitions_;
  const int first_partition_;
  const uint64_t seed_;
  std::vector<Initializer> initializers_;  // one per table
  int64_t unnumbered_updates_ = 0;
  uint64_t first_epoch_ = 0;
  std::vector<RowRange> ranges_;
  MappedMemory weights_;
  std::vector<Slot> slots_;
  std::unique_ptr<Strand[]> strands_;
  std::deque<RowChanges> changes_;  // by partition

  // Rows are initialised in chunks of 2^chunk_shift_ rows, about a page of weights; a bit per chunk
  // says done.
  int chunk_shift_ = 0;
  MappedMemory bitmap_;
  std::atomic<int64_t> missing_chunks_{0};
  static constexpr int kLocks = 64;
  Mutex locks_[kLocks];  // chunk c is initialised under lock c mod 64
};

// How much memory rows will take that nobody has touched yet.

// Collects rows of one stack, each as often as one likes. Not thread-safe; others may touch rows in
// the meantime, so the result is what was true a moment ago.
class NewPages {
 public:
  explicit NewPages(const StackStore& store);

  void Add(int64_t row);
  // Of the pages that hold weights and slots of the rows added, and of no row touched before.
  int64_t bytes() const;

 private:
  struct Array {
    int64_t row_bytes = 0;
    int64_t page_bytes = 0;
    absl::flat_hash_set<int64_t> pages;
  };

  const StackStore& store_;
  std::vector<Array> arrays_;  // the weights, then each slot
};

}  // namespace emberd::shard
