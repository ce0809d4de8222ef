// Rows pooled to the partial sums of samples, on a shard.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "shard/batch/batch.h"
#include "shard/gather/gather_kernels.h"
#include "shard/types.h"

namespace emberd::shard {

// INVALID_ARGUMENT unless the places are those of all samples of `view`, for rows of `width`
// floats.
absl::Status CheckSumPlaces(const SumPlaces& places, const preprocess::StackBatchView& view,
                            int64_t width);

// The sums of one stack of a batch, made in chunks of about equal numbers of entries. Chunks may
// run on several threads at a time.
class Pooling {
 public:
  // `weights`: the rows that `entries` name, as `spec` stores them. Both must outlive it, and so
  // must what is not null of the rest. `places`: where sums are written, checked against the batch;
  // null: all are returned. `room`: memory for those that are returned, from whose front they take
  // what they need; null, or too small: they get some of their own.
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
  // Memory for the sums that are returned.
  float* TakeRows(absl::Span<char>* room, BufferPool& pool);
  void FindRows(const StackEntries& entries, const SumPlaces& places, absl::Span<char>* room,
                BufferPool& pool);

  StackSums sums_;
  PooledArray<float*> rows_;     // of each sample; empty: they lie one after another
  ForwardArgs args_;             // of all samples
  std::vector<int64_t> begins_;  // samples [begins_[c], begins_[c + 1]) make chunk c
};

}  // namespace emberd::shard
