#include "shard/gather/later_sums.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::shard {

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(
    const preprocess::StackBatchView& view, const StackSpec& spec, int partitions,
    absl::Span<const char> rows, BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(StackEntries entries,
                   ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool, cpu));
  return Make(std::move(entries), spec, rows);
}

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(StackEntries entries,
                                                                 const StackSpec& spec,
                                                                 absl::Span<const char> rows) {
  const uint64_t count = entries.partition_ends.back();
  if (rows.size() != count * RowBytes(spec)) {
    return absl::InvalidArgumentError(absl::StrCat("stack ", spec.name, ": ", rows.size(),
                                                   " bytes of unique rows; the batch has ", count,
                                                   " of ", RowBytes(spec), " bytes"));
  }
  return std::shared_ptr<const LaterSums>(new LaterSums(std::move(entries), spec, rows));
}

LaterSums::LaterSums(StackEntries entries, const StackSpec& spec, absl::Span<const char> rows)
    : entries_(std::move(entries)) {
  args_.weights = rows.data();
  args_.dtype = spec.storage_dtype;
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
