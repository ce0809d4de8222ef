#include "shard/gather/later_sums.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::shard {

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(
    const preprocess::StackBatchView& view, const StackSpec& spec, int partitions, Rows rows,
    BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(StackEntries entries,
                   ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool, cpu));
  return Make(std::move(entries), spec, rows);
}

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(StackEntries entries,
                                                                 const StackSpec& spec, Rows rows) {
  if (rows.rounded && (!entries.single_rows || !MayRound(spec))) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", spec.name, ": rounded rows, which the batch does not allow"));
  }
  const uint64_t count = entries.partition_ends.back();
  const int64_t row_bytes = rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec);
  if (rows.rows.size() != count * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("stack ", spec.name, ": ", rows.rows.size(),
                                                   " bytes of unique rows; the batch has ", count,
                                                   " of ", row_bytes, " bytes"));
  }
  return std::shared_ptr<const LaterSums>(new LaterSums(std::move(entries), spec, rows));
}

LaterSums::LaterSums(StackEntries entries, const StackSpec& spec, Rows rows)
    : entries_(std::move(entries)),
      single_rows_(entries_.single_rows && MayRound(spec)),
      row_bytes_(rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec)) {
  args_.weights = rows.rows.data();
  args_.dtype = rows.rounded ? v1::BFLOAT16 : spec.storage_dtype;
  args_.width = spec.embedding_dim;
  args_.partitions = static_cast<int>(entries_.partition_ends.size());
  args_.partition_ends = entries_.partition_ends.data();
  args_.entries = entries_.entries.data();
  args_.quantized = spec.quantized;
  args_.lower = spec.quantization.lower();
  args_.upper = spec.quantization.upper();
  args_.num_buckets = spec.quantization.num_buckets();
}

void LaterSums::Sum(int64_t begin, int64_t end, float* to) const {
  ForwardArgs args = args_;
  args.offsets = entries_.offsets.data() + begin;
  args.end = end - begin;
  args.sums = to;
  SumRows(args);
}

}  // namespace emberd::shard
