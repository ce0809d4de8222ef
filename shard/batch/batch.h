// A batch on a shard: as it arrives, in runs; as the engine keeps it between gather and update, the
// entries of each stack sample by sample; and row by row, as the backward pass walks it and a
// gather may return it.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/csr.h"
#include "shard/kernel_types.h"

namespace emberd::shard {

class Model;
class StackStore;

// Where the rows of one feature's samples lie, in memory of the caller's.
template <typename Value>
struct FeatureRows {
  Value* first = nullptr;    // the row of the feature's first sample; null: there are none
  int64_t width = 0;         // values of a row: as many as the stack is wide
  int64_t stride = 0;        // values from one row to the next
  int64_t first_sample = 0;  // the canonical number of the first sample
  int64_t samples = 0;

  // `sample`: a canonical number of this feature's.
  Value* operator()(int64_t sample) const { return first + (sample - first_sample) * stride; }
};

// The live cells of one (segment, partition). Loops over them have a copy of it, whose pointers can
// stay in registers.
struct Run {
  const int32_t* rows;  // local rows of the partition
  const int32_t* samples;
  const float* gains;
  int64_t size;
};

// The entries of a stack as they arrive: runs of one source slot, partition and mini-batch each.
class RunTable {
 public:
  // INVALID_ARGUMENT if the counts and row ends of `view` do not fit together or its arrays; rows,
  // samples and gains are not looked at.
  static absl::StatusOr<RunTable> Make(const preprocess::StackBatchView& view, int partitions);

  int slots() const { return slots_; }
  int partitions() const { return partitions_; }
  int minibatches() const { return minibatches_; }
  size_t size() const { return runs_.size(); }
  // Runs are numbered [slot][partition][mini-batch].
  int64_t index(int slot, int partition, int minibatch) const {
    return (int64_t{slot} * partitions_ + partition) * minibatches_ + minibatch;
  }
  const Run& at(int slot, int partition, int minibatch) const {
    return runs_[index(slot, partition, minibatch)];
  }
  const std::vector<int64_t>& partition_entries() const { return partition_entries_; }
  int64_t entries() const {
    return std::accumulate(partition_entries_.begin(), partition_entries_.end(), int64_t{0});
  }

 private:
  RunTable(int slots, int partitions, int minibatches)
      : slots_(slots),
        partitions_(partitions),
        minibatches_(minibatches),
        partition_entries_(partitions) {}
  absl::Status AddSegment(const preprocess::StackBatchView& view, size_t s);

  int slots_;
  int partitions_;
  int minibatches_;
  std::vector<Run> runs_;
  std::vector<int64_t> partition_entries_;
};

// The entries of one stack, grouped by sample, samples ascending in canonical order, rows ascending
// inside a sample. So a sample's partitions follow one another in order, and so do the entries of
// each.
struct StackEntries {
  int stack = 0;
  int64_t entry_count = 0;
  std::vector<int64_t> partition_entries;  // of each of the shard's partitions
  std::vector<uint64_t> partition_ends;    // one beyond the last row of each
  PooledArray<int32_t> samples;            // canonical samples that have an entry here, ascending
  PooledArray<uint32_t> offsets;           // sample i has entries [offsets[i], offsets[i + 1])
  PooledArray<Entry> entries;              // entry_count + kEntryPadding
  // Feature f of the stack has the samples [feature_offsets[f], feature_offsets[f + 1]) of
  // `samples`.
  std::vector<uint32_t> feature_offsets;
  int64_t features() const { return static_cast<int64_t>(feature_offsets.size()) - 1; }
  // Of each partition, what OrderByRow makes of this batch alone. Empty: that has to be done.
  std::vector<PooledArray<Touch>> touches;
  bool single_rows = false;  // as in StackBatchView
  // All rows had a value when it was arranged, which no row ever loses. False: nobody has looked,
  // or some may have none (StackStore::EnsureRow).
  bool rows_touched = false;
  // Whether a gather returns unique rows, and which: ascending.
  bool unique_rows = false;
  bool rounded = false;  // to bfloat16
  PooledArray<uint32_t> distinct_rows;
  int64_t bytes() const {
    size_t bytes = samples.bytes() + offsets.bytes() + entries.bytes() + distinct_rows.bytes() +
                   feature_offsets.capacity() * sizeof(uint32_t);
    for (const PooledArray<Touch>& partition : touches) bytes += partition.bytes();
    return static_cast<int64_t>(bytes);
  }
};

// What arranging needs to know of a stack.
struct StackShape {
  int partitions = 1;  // of this shard
  int64_t rows_per_partition = 0;
  // What a gather returns, and the bytes of one sample's partial sum and of one unique row, from
  // which AUTO chooses.
  v1::ResultMode result_mode = v1::PARTIAL_SUMS;
  int64_t sum_bytes = 0;
  int64_t row_bytes = 0;
  bool rounded = false;  // unique rows are returned as bfloat16
  // Whether an update may follow with a gradient for each sample. One for each row needs no order.
  bool orders_touches = false;
  const StackStore* store = nullptr;  // that has its rows, for the call; null: it is not known
};

// Checks every number of `view` and arranges its entries: two passes over the entries, a counting
// sort by sample; then touches, where they are wanted. INVALID_ARGUMENT names segment, position,
// value and allowed range.
absl::StatusOr<StackEntries> ArrangeEntries(const preprocess::StackBatchView& view,
                                            const StackShape& shape, BufferPool& pool,
                                            CpuPool& cpu);
// The same for callers that do not have the stack, but the unique rows of this batch: entries name
// a row by its place among these, and so do partition_ends. `shape` needs no result_mode.
absl::StatusOr<StackEntries> ArrangeForUniqueRows(const preprocess::StackBatchView& view,
                                                  const StackShape& shape, BufferPool& pool,
                                                  CpuPool& cpu);

// What ArrangeEntries promises, of entries that come from elsewhere. INVALID_ARGUMENT names what
// does not hold.
absl::Status CheckEntries(const StackEntries& entries, const StackShape& shape);

// A batch that has been checked against the model and arranged for gather and update. Immutable,
// thread-safe.
class Batch {
 public:
  Batch(std::weak_ptr<Model> model, std::vector<StackEntries> stacks)
      : model_(std::move(model)), stacks_(std::move(stacks)) {}
  // NOT_FOUND: it was dropped.
  absl::StatusOr<std::shared_ptr<Model>> model() const;
  const std::vector<StackEntries>& stacks() const { return stacks_; }
  int64_t bytes() const;

 private:
  const std::weak_ptr<Model> model_;
  const std::vector<StackEntries> stacks_;
};

// ---- Row by row
//
// A step is made of one or more parts: the batches of the ranks of a synchronous group, which
// together are one global batch. Its canonical sample order is (feature of the stack, rank, sample
// of the rank), as if the ranks' samples had been concatenated feature by feature.

// Touches of the shard's k-th partition by (row, canonical sample), and kTouchPadding more. `parts`
// are of one stack, in rank order, and have the same number of features. Features whose tables
// follow one another are sorted one by one, by radix, over the bits that the table's rows have.
PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool);

// The same touches of all partitions of a batch that is the only part, from its runs: those of a
// partition are merged, slot by slot, which is cheaper than sorting. `canonical[slot]`: of each
// sample id of the slot its canonical sample; `place`: of each canonical sample that has entries,
// its index in StackEntries.samples. Empty if there are several mini-batches, or a run is not in
// order of (row, canonical sample), as it comes from preprocessing. A partition without entries has
// no padding either.
std::vector<PooledArray<Touch>> MergeTouches(const RunTable& runs,
                                             absl::Span<const absl::Span<const int32_t>> canonical,
                                             absl::Span<const uint32_t> place, BufferPool& pool,
                                             CpuPool& cpu);

// --- The distinct rows of one stack of a batch on one shard: what a gather returns as unique rows.
// The shard and the coordinator find them each for itself, from the same batch, and so agree on
// their order.

// A group: neighbouring entries of a run that name the same row. In a run as preprocessing makes it
// each row is one group; from the wire anything may come.
int64_t CountGroups(const Run& run);

struct DistinctRows {
  // k * rows_per_partition + local row, ascending.
  PooledArray<uint32_t> rows;
  // Rows of partition k end here: [partitions].
  std::vector<uint64_t> partition_ends;
  // For run i, where its groups begin in `ranks`, which says where in `rows` each group's row
  // stands: [runs]. By RunTable::index.
  std::vector<int64_t> first_group;
  PooledArray<uint32_t> ranks;
};

// `groups`: CountGroups of each run. Local rows have been checked against `rows_per_partition`.
DistinctRows FindDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups,
                              int64_t rows_per_partition, BufferPool& pool, CpuPool& cpu);

// A number of rows that DistinctRows cannot fall below if `runs` are a slot's mini-batches as
// preprocessing makes them, which share no row: the groups of the fullest slot of each partition.
int64_t LeastDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups);

}  // namespace emberd::shard
