#include "shard/gather/row_pooler.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/buffer_pool.h"
#include "shard/batch/batch.h"
#include "shard/executor.h"
#include "shard/gather/pooling.h"

namespace emberd::shard {
namespace {

class RowPoolerImpl final : public RowPooler {
 public:
  explicit RowPoolerImpl(int threads) : executor_(threads) {}

  absl::StatusOr<StackSums> Pool(const preprocess::StackBatchView& view, const StackSpec& spec,
                                 int partitions, absl::Span<const char> rows) override {
    absl::StatusOr<StackEntries> entries =
        ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool_, executor_);
    if (!entries.ok()) return entries.status();
    const uint64_t bytes = entries->partition_ends.back() * RowBytes(spec);
    if (rows.size() != bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stack ", spec.name, ": ", rows.size(), " bytes of unique rows; the batch has ",
          entries->partition_ends.back(), " of ", RowBytes(spec), " bytes"));
    }
    StackSums sums;
    sums.stack = view.stack;
    sums.width = spec.embedding_dim;
    sums.rows_gathered = entries->entry_count;
    sums.samples.assign(entries->samples.data(), entries->samples.data() + entries->samples.size());
    auto buffer = std::make_shared<PooledArray<float>>(pool_, sums.samples.size() * sums.width);
    const ForwardArgs all = MakeForwardArgs(spec, rows.data(), *entries, buffer->data());
    const std::vector<int64_t> begins = CutSamples(*entries, sums.width);
    executor_.ParallelFor(static_cast<int>(begins.size()) - 1, [&](int chunk) {
      ForwardArgs args = all;
      args.begin = begins[chunk];
      args.end = begins[chunk + 1];
      SumRows(args);
    });
    sums.sums = std::move(buffer);
    return sums;
  }

 private:
  BufferPool pool_;
  Executor executor_;
};

}  // namespace

std::unique_ptr<RowPooler> RowPooler::Create(int threads) {
  return std::make_unique<RowPoolerImpl>(threads);
}

}  // namespace emberd::shard
