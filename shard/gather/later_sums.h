// Partial sums that are made of unique rows when they are used, a few at a time, while they are in
// the cache: the other half of a gather that returned the rows.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "base/cpu_pool.h"
#include "preprocess/batch/csr.h"
#include "shard/batch/batch.h"
#include "shard/gather/gather_kernels.h"
#include "shard/types.h"

namespace emberd::shard {

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

  // The same of entries that ArrangeForUniqueRows has made of the view.
  static absl::StatusOr<std::shared_ptr<const LaterSums>> Make(StackEntries entries,
                                                               const StackSpec& spec, Rows rows);

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
  const char* SingleRow(int64_t i) const { return RowAt(entries_.entries[i].row); }
  // Of all rows.
  int64_t bytes() const {
    return static_cast<int64_t>(entries_.partition_ends.back()) * row_bytes_;
  }
  // Of `rows`, by its place; what follows it are the rows of the next places.
  const char* RowAt(int64_t place) const { return args_.weights + place * row_bytes_; }

 private:
  LaterSums(StackEntries entries, const StackSpec& spec, Rows rows);

  const StackEntries entries_;
  const bool single_rows_;
  const int64_t row_bytes_;
  ForwardArgs args_;  // without the samples and the sums
};

}  // namespace emberd::shard
