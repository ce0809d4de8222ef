// The rows of one stack that this shard owns: weights and optimizer slots of K partitions, how they
// begin, and which of them have changed since a moment.
//
// A row is named by `row = k * rows_per_partition + local row`, k counting the shard's own
// partitions from 0. Weights and each slot are arrays of their own, [K * rows_per_partition,
// columns].
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "config/optimizers.h"
#include "emberd/v1/model.pb.h"
#include "shard/kernel_types.h"
#include "shard/store/initializer.h"

namespace emberd::shard {

class MemoryManager;
class SpillFile;

// ---- What a shard must know of a model: its stacks, and how their rows begin and learn

// Rows [row_offset, row_offset + padded rows / P) of every partition belong to this table.
// Logical id e: partition (e + shard_rotation) mod P, local row e div P + row_offset.
struct TableSpec {
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t padded_vocabulary_size = 0;
  int embedding_dim = 0;  // columns beyond it are padding: always 0
  int64_t row_offset = 0;
  int shard_rotation = 0;
  v1::InitializerConfig initializer;
  std::string seed_name;  // with the seed, key of the initial values; empty: the name

  const std::string& SeedName() const { return seed_name.empty() ? name : seed_name; }
};

struct StackSpec {
  std::string name;
  int embedding_dim = 0;  // padded width
  int64_t rows_per_partition = 0;
  std::vector<TableSpec> tables;
  v1::OptimizerConfig optimizer;  // complete: every field present
  v1::DataType storage_dtype = v1::FLOAT32;
  bool stochastic_rounding = false;  // of 16-bit weights, in updates
  bool skip_nonfinite = false;       // rows with a sum that is not finite; else it is refused
  v1::ResultMode result_mode = v1::PARTIAL_SUMS;
  bool quantized = false;
  v1::QuantizationConfig quantization;
  // Not empty: every model with a stack of this resource has the same rows, see SharedStacks. It
  // has one table, which fills it and is not rotated; names of both differ from model to model.
  std::string resource;
};

// Bytes of the weights of one row.
inline int64_t RowBytes(const StackSpec& stack) {
  return stack.embedding_dim * config::WeightBytes(stack.storage_dtype);
}

// Whether rows of the stack can be returned as bfloat16 instead of as they are stored, and what one
// has then.
inline bool MayRound(const StackSpec& stack) {
  return stack.storage_dtype == v1::FLOAT32 && !stack.quantized;
}
inline int64_t RoundedRowBytes(const StackSpec& stack) {
  return stack.embedding_dim * config::WeightBytes(v1::BFLOAT16);
}

struct ModelSpec {
  uint64_t model_id = 0;
  std::string name;
  uint64_t seed = 0;
  int partitions = 1;       // P, of the whole cluster
  int first_partition = 0;  // this shard owns [first_partition, first_partition + partition_count)
  int partition_count = 1;  // K, a power of two
  std::vector<StackSpec> stacks;
};

struct EngineOptions {
  CpuPool* cpu = nullptr;  // required; must outlive the engine
  // Bytes of weights and slots that one partition may hold over all models; checked before memory
  // is taken.
  int64_t bytes_per_partition = int64_t{16} << 30;
  // Stacks of at most this many bytes on this shard get all their rows when the model is created;
  // larger ones row by row when first touched. The bits are the same.
  int64_t eager_bytes = int64_t{64} << 20;
  // Arrays of at most this many bytes are backed by huge pages: up to twice as fast, but a first
  // touch takes 2 MiB.
  int64_t huge_page_bytes = int64_t{8} << 30;
  // Buffers that are kept for the next requests, in all.
  int64_t idle_buffer_bytes = int64_t{1} << 30;
  // Instead of bytes_per_partition, for models that may be evicted; null: they stay.
  std::shared_ptr<MemoryManager> memory = nullptr;
};

// ---- Which rows of one partition have changed since a moment, and what they were at that moment
//
// Rows are grouped in the chunks in which their store initialises them. Nothing is kept until the
// first snapshot is begun; from then on every write is preceded by BeforeWrite, which costs a bit
// test for a chunk that has changed before.

// Numbers of chunks: a bit for each of [first, first + count).
class ChunkSet {
 public:
  ChunkSet() = default;
  ChunkSet(int64_t first, int64_t count, bool full)
      : first_(first), words_((count + 63) / 64, full ? ~uint64_t{0} : 0) {}

  bool Has(int64_t chunk) const {
    const int64_t i = chunk - first_;
    return words_[i / 64] >> (i % 64) & 1;
  }
  void Add(int64_t chunk) {
    const int64_t i = chunk - first_;
    words_[i / 64] |= uint64_t{1} << (i % 64);
  }
  void Remove(int64_t chunk) {
    const int64_t i = chunk - first_;
    words_[i / 64] &= ~(uint64_t{1} << (i % 64));
  }
  // The first one at or after `chunk`; `end` if there is none before it.
  int64_t NextFrom(int64_t chunk, int64_t end) const;
  int64_t Count() const;
  void AddAll(const ChunkSet& other);

 private:
  int64_t first_ = 0;
  std::vector<uint64_t> words_;
};

// Takes the rows of a chunk as they are, before they change.
class ChunkCopier {
 public:
  virtual ~ChunkCopier() = default;
  virtual void CopyBeforeWrite(int64_t chunk) = 0;
};

// Guarded by the strand of the partition: whoever writes rows, begins a snapshot or ends it holds
// it for writing, the one reader of a snapshot for reading.
class RowChanges {
 public:
  // The partition's rows are in chunks [first, first + count).
  RowChanges(int64_t first, int64_t count) : first_(first), count_(count) {}

  // False: BeforeWrite has nothing to do.
  bool tracking() const { return tracking_; }
  // Before a row of the chunk is given its initial value or written.
  void BeforeWrite(int64_t chunk) {
    if (tracking_ && !changed_.Has(chunk)) FirstWrite(chunk);
  }

  // A snapshot begins: of all chunks, or of those that have changed since the last one that was
  // kept. `copier` hears of chunks of it that are about to change, until End.
  void Begin(bool changed_only, std::shared_ptr<ChunkCopier> copier);
  // The snapshot of this copier is over. Unless it was kept, the next one counts changes from where
  // it began itself.
  void End(const ChunkCopier* copier, bool kept);
  // What has changed counts from now on, without a snapshot: the rows have just been restored.
  void Track();

  // Takes out of the snapshot of this copier the first chunk at or after `chunk` that is still to
  // be read; -1: there is none before `end`. A reader may come late, when its snapshot is over and
  // another one is under way: it gets nothing of that.
  int64_t TakePending(const ChunkCopier* copier, int64_t chunk, int64_t end);

  int64_t first() const { return first_; }
  int64_t end() const { return first_ + count_; }
  // Chunks that have changed since the newest snapshot that was kept. Guarded by nothing.
  int64_t changed() const { return changed_count_.load(std::memory_order_relaxed); }

 private:
  void FirstWrite(int64_t chunk);

  const int64_t first_;
  const int64_t count_;
  bool tracking_ = false;
  ChunkSet changed_;  // since the newest snapshot began
  std::atomic<int64_t> changed_count_{0};
  ChunkSet before_;                      // what the snapshot under way has of changes
  ChunkSet pending_;                     // of the snapshot: neither read nor copied yet
  std::shared_ptr<ChunkCopier> copier_;  // null: no snapshot is under way
};

// ---- The rows

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
                                                            const EngineOptions& options);
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
  void FillIfSmall(const EngineOptions& options);

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
  absl::Status Reserve(const EngineOptions& options);
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
  absl::Mutex locks_[kLocks];  // chunk c is initialised under lock c mod 64
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
