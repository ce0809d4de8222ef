// Rows pooled to the partial sums of samples: on a shard, and later, by whoever got the rows; and
// the kernels of it: rows gathered, quantized, weighted and summed, or copied as they are stored.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "emberd/v1/types.pb.h"
#include "preprocess/batch/csr.h"
#include "shard/batch/batch.h"
#include "shard/kernel_types.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {

// ---- Kernels

struct ForwardArgs {
  const char* weights = nullptr;  // [rows, width] of dtype
  v1::DataType dtype = v1::FLOAT32;
  int width = 0;  // multiple of 8
  int partitions = 1;
  // Rows below partition_ends[k] lie in partition k or an earlier one: [partitions]. Needed for
  // more than one partition.
  const uint64_t* partition_ends = nullptr;
  const Entry* entries = nullptr;  // kEntryPadding more may be read beyond the last
  const uint32_t* offsets = nullptr;
  // Samples [begin, end) of the stack; sums[i, width] for sample i, or, if `rows` is not null,
  // rows[i], [width].
  int64_t begin = 0;
  int64_t end = 0;
  float* sums = nullptr;
  float* const* rows = nullptr;
  bool quantized = false;
  float lower = 0, upper = 0;
  int num_buckets = 2;
};

// For each sample and partition: +0 + gain * row + gain * row ... in entry order, multiply and add
// rounded separately; then the partitions' sums by a balanced binary tree, those without an entry
// left out. Same bits on every CPU.
void SumRows(const ForwardArgs& args);

struct CopyRowsArgs {
  const char* weights = nullptr;  // [rows, row_bytes]
  int64_t row_bytes = 0;          // a multiple of 16
  const uint32_t* rows = nullptr;
  int64_t count = 0;
  char* out = nullptr;  // [count, row_bytes]
};

// out[i] = weights[rows[i]].
void CopyRows(const CopyRowsArgs& args);
// The weights are float32. out[i] = ToBfloat16(+0 + weights[rows[i]]): [count, row_bytes / 2].
void CopyRoundedRows(const CopyRowsArgs& args);

// ---- Where a gather writes, and what it returns

class LaterSums;

// Where a gather writes the sums of one stack.
struct SumPlaces {
  int stack = 0;
  std::vector<FeatureRows<float>> features;  // all of the stack's, in canonical order
  // Sums of these samples are returned instead: bit s % 32 of word s / 32 stands for canonical
  // sample s. Empty: none.
  std::vector<uint32_t> passed_over;

  bool PassesOver(int64_t sample) const {
    return !passed_over.empty() && (passed_over[sample / 32] >> (sample % 32) & 1) != 0;
  }
  int64_t CountPassedOver() const {
    return std::accumulate(passed_over.begin(), passed_over.end(), int64_t{0},
                           [](int64_t sum, uint32_t word) { return sum + std::popcount(word); });
  }
};
struct GatherPlaces {
  std::vector<SumPlaces> stacks;      // those of other stacks are returned
  absl::Span<char> room;              // where what is returned may lie; from a multiple of 64 on
  std::shared_ptr<const void> owner;  // keeps all of it alive

  const SumPlaces* Find(int stack) const {
    for (const SumPlaces& places : stacks) {
      if (places.stack == stack) return &places;
    }
    return nullptr;
  }
};

// Partial sums of one stack over this shard's partitions.
struct StackSums {
  int stack = 0;
  absl::Span<const int32_t> samples;  // canonical samples with at least one entry here, ascending
  absl::Span<const float> sums;       // [rows, padded width], in the order of `samples`
  int64_t rows_gathered = 0;          // entries of the batch
  int64_t rows = 0;
  // Sums were written to their SumPlaces; those of the samples that these pass over follow. False:
  // all follow.
  bool placed = false;
  // Not null: makes the sums, which do not follow.
  std::shared_ptr<const LaterSums> later = nullptr;
  std::shared_ptr<const void> owner = nullptr;  // keeps the spans alive; null: the caller does

  int64_t bytes() const {
    return static_cast<int64_t>(samples.size() * sizeof(int32_t) + sums.size() * sizeof(float));
  }
};

// The distinct rows of one stack that a batch names on this shard, as they are stored: partition by
// partition, local rows ascending. Whoever has the batch makes the same partial sums of them
// (LaterSums).
struct StackRows {
  int stack = 0;
  int64_t row_bytes = 0;
  absl::Span<const char> rows;                  // of row_bytes each
  int64_t rows_gathered = 0;                    // entries of the batch
  bool rounded = false;                         // they are +0 + row, rounded to bfloat16
  std::shared_ptr<const void> owner = nullptr;  // as in StackSums

  int64_t bytes() const { return static_cast<int64_t>(rows.size()); }
};

// Every stack of the batch stands in one of the two, each in the order of the batch.
struct GatherOutput {
  std::vector<StackSums> sums;
  std::vector<StackRows> rows;
};

// ---- The sums of a batch

// INVALID_ARGUMENT unless the places are those of all samples of `view`, for rows of `width`
// floats.
absl::Status CheckSumPlaces(const SumPlaces& places, const preprocess::StackBatchView& view,
                            int64_t width);

// The sums of one stack of a batch, made in chunks of about equal numbers of entries. Chunks may
// run on several threads at a time.
class Pooling {
 public:
  // `weights`: the rows that `entries` name, as `spec` stores them. What is passed must outlive the
  // Pooling. `places`: where sums are written, checked against the batch; null: all are returned.
  // `room`: memory for those that are returned, which take what they need from its front; null, or
  // too small: they get memory of their own.
  Pooling(const StackSpec& spec, const char* weights, const StackEntries& entries, BufferPool& pool,
          const SumPlaces* places = nullptr, absl::Span<char>* room = nullptr);

  // At least one.
  int chunks() const { return static_cast<int>(begins_.size()) - 1; }
  // What a chunk reads.
  absl::Span<const Entry> Entries(int chunk) const;
  void Run(int chunk) const;
  // To be called once. The sums are complete when all chunks have run.
  StackSums TakeSums() { return std::move(sums_); }

 private:
  // What the sums that are returned refer to, but for a room.
  struct Returned {
    std::vector<int32_t> samples;
    PooledArray<float> sums;
  };
  // Memory for the sums that are returned.
  float* TakeRows(absl::Span<char>* room, BufferPool& pool, Returned* returned);
  void FindRows(const StackEntries& entries, const SumPlaces& places, absl::Span<char>* room,
                BufferPool& pool, Returned* returned);

  StackSums sums_;
  PooledArray<float*> rows_;     // of each sample; empty: they lie one after another
  ForwardArgs args_;             // of all samples
  std::vector<int64_t> begins_;  // samples [begins_[c], begins_[c + 1]) make chunk c
};

// Partial sums that are made of unique rows when they are used, a few at a time, while they are in
// the cache: the other half of a gather that returned the rows.
//
// The sums of one stack. Immutable, thread-safe.
class LaterSums {
 public:
  // The shard's answer, as in StackRows; the rows must outlive the sums.
  struct Rows {
    absl::Span<const char> rows;
    bool rounded = false;
  };
  // `view`: what the shard was asked to gather; `spec`: that stack; `partitions`: of the shard.
  // INVALID_ARGUMENT if `rows` has not the bytes of all distinct rows of `view`, or is rounded
  // where that loses something.
  static absl::StatusOr<std::shared_ptr<const LaterSums>> Make(
      const preprocess::StackBatchView& view, const StackSpec& spec, int partitions, Rows rows,
      BufferPool& pool, CpuPool& cpu);

  // They name rows by their places in `rows`.
  const StackEntries& entries() const { return entries_; }
  absl::Span<const int32_t> samples() const {
    return {entries_.samples.data(), entries_.samples.size()};
  }
  // Writes those of samples()[begin, end), [end - begin, width], to memory aligned to 64: the sums
  // that the shard would have made, by the same kernel, and so with the same bits.
  void Sum(int64_t begin, int64_t end, float* to) const;

  // Whether each sum is +0 + one of `rows`, of row_dtype(), FLOAT32 or BFLOAT16. Then SingleRow(i),
  // [width], is that of samples()[i]. Of rounded rows, which have all been added to +0, there are
  // no other sums.
  bool single_rows() const { return single_rows_; }
  v1::DataType row_dtype() const { return args_.dtype; }
  const char* SingleRow(int64_t i) const {
    return args_.weights + int64_t{entries_.entries[i].row} * row_bytes_;
  }
  // Of all rows.
  int64_t bytes() const {
    return static_cast<int64_t>(entries_.partition_ends.back()) * row_bytes_;
  }

 private:
  LaterSums(StackEntries entries, const StackSpec& spec, Rows rows);

  const StackEntries entries_;
  const bool single_rows_;
  const int64_t row_bytes_;
  ForwardArgs args_;  // without the samples and the sums
};

}  // namespace emberd::shard
