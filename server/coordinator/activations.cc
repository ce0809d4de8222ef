#include "server/coordinator/activations.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/aligned_allocator.h"
#include "server/coordinator/request_reader.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::server {
namespace {

constexpr size_t kAlignment = 64;

// Walks over the samples of one feature and folds each over the shards.
class FeatureCombiner {
 public:
  // `stacks[i]`: the sums of shard i of the feature's stack.
  FeatureCombiner(std::vector<const StackSumsView*> stacks, int width, int64_t first_sample)
      : stacks_(std::move(stacks)),
        width_(width),
        cursors_(stacks_.size()),
        nodes_(stacks_.size()),
        blocks_(stacks_.size()),
        scratch_(stacks_.size() * width) {
    for (size_t i = 0; i < stacks_.size(); ++i) {
      const absl::Span<const int32_t> samples = stacks_[i]->samples;
      cursors_[i] =
          std::lower_bound(samples.begin(), samples.end(), first_sample) - samples.begin();
    }
  }

  // The sum for `sample`, [width]; null if no shard has an entry. Samples must ascend from call to
  // call.
  const float* Fold(int64_t sample) {
    for (size_t i = 0; i < stacks_.size(); ++i) {
      const StackSumsView& sums = *stacks_[i];
      const bool here = cursors_[i] < sums.samples.size() && sums.samples[cursors_[i]] == sample;
      nodes_[i] = here ? SumAt(i, cursors_[i]++) : nullptr;
    }
    for (size_t step = 1; step < nodes_.size(); step *= 2) {
      for (size_t i = 0; i + step < nodes_.size(); i += 2 * step)
        nodes_[i] = Add(nodes_[i], nodes_[i + step], i);
    }
    return nodes_[0];
  }

 private:
  // Sums that are made here, so many at a time that they stay in the cache.
  struct Block {
    size_t begin = 0, end = 0;  // places in the shard's samples
    hwy::AlignedFreeUniquePtr<float[]> sums;
  };
  static constexpr size_t kBlockBytes = size_t{64} << 10;

  const float* SumAt(size_t shard, size_t place) {
    const StackSumsView& sums = *stacks_[shard];
    if (sums.later == nullptr) return sums.sums.data() + place * width_;
    Block& block = blocks_[shard];
    if (place >= block.end) {
      const size_t most = std::max<size_t>(1, kBlockBytes / (width_ * sizeof(float)));
      if (block.sums == nullptr) block.sums = hwy::AllocateAligned<float>(most * width_);
      block.begin = place;
      block.end = std::min(sums.samples.size(), place + most);
      sums.later->Sum(block.begin, block.end, block.sums.get());
    }
    return block.sums.get() + (place - block.begin) * width_;
  }

  // Partial sums start from +0 and so are never -0: leaving an absent one out gives the same bits
  // as adding zeros.
  const float* Add(const float* left, const float* right, size_t node) {
    if (right == nullptr) return left;
    if (left == nullptr) return right;
    float* sum = scratch_.data() + node * width_;
    for (int column = 0; column < width_; ++column) sum[column] = left[column] + right[column];
    return sum;
  }

  const std::vector<const StackSumsView*> stacks_;
  const int width_;
  std::vector<size_t> cursors_;
  std::vector<const float*> nodes_;
  std::vector<Block> blocks_;
  std::vector<float> scratch_;
};

void WriteRow(const float* row, int64_t dim, v1::DataType dtype, char* to) {
  if (row == nullptr) {
    std::memset(to, 0, dim * ElementSize(dtype));
  } else if (dtype == v1::FLOAT32) {
    std::memcpy(to, row, dim * sizeof(float));
  } else {
    shard::RoundToBfloat16(row, dim, to);
  }
}

bool SumsFit(const StackSumsView& sums, int width, int64_t stack_samples) {
  if (sums.sums.size() != sums.samples.size() * width) return false;
  int64_t last = -1;
  for (const int32_t sample : sums.samples) {
    if (sample <= last) return false;
    last = sample;
  }
  return last < stack_samples;
}

}  // namespace

int64_t MaxGatherBytes(const ServedModel& model,
                       absl::Span<const preprocess::StackBatchView> stacks) {
  int64_t bytes = 0;
  for (const preprocess::StackBatchView& view : stacks) {
    int64_t entries = 0;
    for (const preprocess::CsrSegmentView& segment : view.segments) {
      entries += static_cast<int64_t>(segment.embedding_ids.size());
    }
    const shard::StackSpec& stack = model.shard_stacks[view.stack];
    const auto sum_bytes =
        static_cast<int64_t>(sizeof(int32_t) + stack.embedding_dim * sizeof(float));
    const int64_t sums = std::min<int64_t>(entries, view.sample_count) * sum_bytes;
    const int64_t rows = entries * shard::RowBytes(stack);
    switch (stack.result_mode) {
      case v1::PARTIAL_SUMS:
        bytes += sums;
        break;
      case v1::UNIQUE_ROWS:
        bytes += rows;
        break;
      default:
        bytes += std::min(sums, rows);
    }
  }
  return bytes;
}

absl::Status CheckGatherResult(const GatherResult& result, const ServedModel& model,
                               const preprocess::PreprocessedBatch& batch) {
  const auto& stacks = model.plan.stacks;
  if (result.stacks.size() + result.rows.size() != stacks.size()) {
    return absl::InternalError(absl::StrCat("results of ",
                                            result.stacks.size() + result.rows.size(),
                                            " stacks instead of ", stacks.size()));
  }
  auto sums = result.stacks.begin();
  auto rows = result.rows.begin();
  for (int i = 0; i < static_cast<int>(stacks.size()); ++i) {
    if (sums != result.stacks.end() && sums->stack == i &&
        SumsFit(*sums++, stacks[i].embedding_dim, batch.stack_samples(i))) {
      continue;
    }
    if (rows != result.rows.end() && rows->stack == i &&
        rows++->row_bytes == shard::RowBytes(model.shard_stacks[i])) {
      continue;
    }
    return absl::InternalError(
        absl::StrCat("the result of stack '", stacks[i].name, "' does not fit the batch"));
  }
  return absl::OkStatus();
}

ArrangedStacks ArrangeAhead(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                            int shard, BufferPool& pool, CpuPool& cpu) {
  ArrangedStacks arranged(model.plan.stacks.size());
  const int partitions = model.plan.topology.sparsecores_per_shard;
  for (const preprocess::StackBatchView& view : batch.ShardView(shard)) {
    const shard::StackSpec& spec = model.shard_stacks[view.stack];
    if (spec.result_mode == v1::PARTIAL_SUMS) continue;
    auto entries =
        shard::ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool, cpu);
    if (entries.ok()) arranged[view.stack] = *std::move(entries);
  }
  return arranged;
}

absl::Status ArrangeUniqueRows(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                               int shard, BufferPool& pool, CpuPool& cpu, GatherResult* result,
                               ArrangedStacks ahead) {
  if (result->rows.empty()) return absl::OkStatus();
  result->later.resize(model.plan.stacks.size());
  const std::vector<preprocess::StackBatchView> views = batch.ShardView(shard);
  for (const StackRowsView& rows : result->rows) {
    const shard::StackSpec& spec = model.shard_stacks[rows.stack];
    ahead.resize(model.plan.stacks.size());
    std::optional<shard::StackEntries>& entries = ahead[rows.stack];
    auto later = entries.has_value()
                     ? shard::LaterSums::Make(*std::move(entries), spec, rows.rows)
                     : shard::LaterSums::Make(views[rows.stack], spec,
                                              model.plan.topology.sparsecores_per_shard, rows.rows,
                                              pool, cpu);
    if (!later.ok()) return absl::InternalError(later.status().message());
    const shard::LaterSums& sums = *(result->later[rows.stack] = *std::move(later));
    result->stacks.push_back({rows.stack, sums.samples(), {}, rows.rows_gathered, &sums});
  }
  std::sort(result->stacks.begin(), result->stacks.end(),
            [](const StackSumsView& a, const StackSumsView& b) { return a.stack < b.stack; });
  result->rows.clear();
  return absl::OkStatus();
}

namespace {

// Memory of their own, by features of the config.
SharedOutput TakeOutput(const ServedModel& model, absl::Span<const int64_t> samples,
                        v1::DataType dtype) {
  std::vector<int> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  SharedOutput output;
  output.layout = LayOutActivations(model, samples, order, dtype, /*concat=*/false);
  output.memory.reset(
      static_cast<char*>(std::aligned_alloc(kAlignment, std::max(output.layout.bytes, kAlignment))),
      std::free);
  return output;
}

}  // namespace

Activations CombineActivations(absl::Span<const GatherResult> results, const ServedModel& model,
                               const preprocess::PreprocessedBatch& batch, v1::DataType dtype,
                               const SharedOutput* output, CpuPool* cpu) {
  SharedOutput own;
  const bool shared = output != nullptr;
  if (!shared) {
    own = TakeOutput(model, batch.feature_samples(), dtype);
    output = &own;
  }
  Activations activations;
  activations.dtype = dtype;
  const int features = model.config.features_size();
  if (!shared) activations.features.resize(features);
  const auto combine = [&](int64_t i) {
    const int stack = model.plan.feature_at[i].stack;
    const int64_t first = batch.feature_sample_begin()[i];
    const int64_t samples = batch.feature_samples()[i];
    const int64_t dim = model.TableOfFeature(static_cast<int>(i)).embedding_dim();
    std::vector<const StackSumsView*> sums;
    for (const GatherResult& result : results) sums.push_back(&result.stacks[stack]);
    FeatureCombiner combiner(std::move(sums), model.plan.stacks[stack].embedding_dim, first);
    char* to = output->memory.get() + output->layout.offsets[i];
    if (!shared) {
      activations.features[i] = {samples, dim,
                                 absl::MakeConstSpan(to, samples * dim * ElementSize(dtype))};
    }
    for (int64_t sample = 0; sample < samples; ++sample, to += output->layout.strides[i]) {
      WriteRow(combiner.Fold(first + sample), dim, dtype, to);
    }
  };
  ParallelFor(cpu, features, combine);
  activations.owner = output->memory;
  if (shared) activations.shared_bytes = output->layout.bytes;
  return activations;
}

}  // namespace emberd::server
