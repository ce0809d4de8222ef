// Rows pooled to the partial sums of samples: on a shard, or where its unique rows arrive.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "base/cpu_pool.h"
#include "preprocess/batch/csr.h"
#include "shard/batch/batch.h"
#include "shard/gather/gather_kernels.h"
#include "shard/types.h"

namespace emberd::shard {

// The sums of one stack of a batch, made in chunks of about equal numbers of entries. Chunks may
// run on several threads at a time.
class Pooling {
 public:
  // `weights`: the rows that `entries` name, as `spec` stores them. Both must outlive it.
  Pooling(const StackSpec& spec, const char* weights, const StackEntries& entries,
          BufferPool& pool);

  // At least one.
  int chunks() const { return static_cast<int>(begins_.size()) - 1; }
  // What a chunk reads.
  absl::Span<const Entry> Entries(int chunk) const;
  void Run(int chunk) const;
  // To be called once. The sums are complete when all chunks have run.
  StackSums TakeSums() { return std::move(sums_); }

 private:
  StackSums sums_;
  ForwardArgs args_;             // of all samples
  std::vector<int64_t> begins_;  // samples [begins_[c], begins_[c + 1]) make chunk c
};

// The other half of a gather that returns unique rows: whoever has the batch makes of the rows the
// partial sums that the shard would have made, by the same kernel, and so with the same bits.
// Thread-safe. Its results outlive it.
class RowPooler {
 public:
  // `cpu` must outlive the pooler.
  explicit RowPooler(CpuPool* cpu) : cpu_(*cpu) {}

  // `view`: what the shard was asked to gather, of one stack; `spec`: that stack; `partitions`: of
  // the shard. `rows`: the shard's answer, StackRows.rows.
  // INVALID_ARGUMENT if `rows` has not the bytes of all distinct rows of `view`.
  absl::StatusOr<StackSums> Pool(const preprocess::StackBatchView& view, const StackSpec& spec,
                                 int partitions, absl::Span<const char> rows);

 private:
  CpuPool& cpu_;
  BufferPool pool_;
};

}  // namespace emberd::shard
