#include "server/step/activations.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "hwy/aligned_allocator.h"
#include "server/step/request_reader.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::step {
namespace {

// How far apart sums may lie in an answer's room.
constexpr int64_t kRoomAlignment = 64;

// Samples whose sums a shard that writes the others in place has returned.
int64_t CountReturned(absl::Span<const int32_t> samples, const shard::SumPlaces& places) {
  if (places.passed_over.empty()) return 0;
  return std::count_if(samples.begin(), samples.end(),
                       [&](int32_t sample) { return places.PassesOver(sample); });
}

// Where a feature begins in what a shard has answered of its stack.
struct FeatureStart {
  size_t sample = 0;  // index of StackSums.samples
  int64_t row = 0;    // of StackSums.sums
};
// By feature of the config.
std::vector<FeatureStart> FindStarts(const host::GatherResult& result, const ServedModel& model,
                                     const preprocess::PreprocessedBatch& batch) {
  std::vector<FeatureStart> starts(model.config.features_size());
  for (size_t k = 0; k < result.stacks.size(); ++k) {
    const shard::StackSums& sums = result.stacks[k];
    const shard::SumPlaces* const places =
        sums.placed ? result.places.Find(static_cast<int>(k)) : nullptr;
    FeatureStart next;
    for (const preprocess::FeaturePlan& feature : model.plan.stacks[k].features) {
      starts[feature.feature] = next;
      const int64_t end =
          batch.feature_sample_begin()[feature.feature] + batch.feature_samples()[feature.feature];
      const auto from = sums.samples.begin() + next.sample;
      const size_t count = std::lower_bound(from, sums.samples.end(), end) - from;
      if (places == nullptr) {
        next.row += static_cast<int64_t>(count);
      } else if (!sums.sums.empty()) {
        next.row += CountReturned(sums.samples.subspan(next.sample, count), *places);
      }
      next.sample += count;
    }
  }
  return starts;
}

// What one shard has of a feature's samples: a walk over its answer.
struct ShardWalk {
  ShardWalk(const shard::StackSums& answer, const shard::SumPlaces* asked,
            const FeatureStart& start)
      : samples(answer.samples),
        placed(answer.placed ? asked : nullptr),
        rows(answer.sums.data()),
        later(answer.later.get()),
        next(start.sample),
        row(start.row) {}

  bool Has(int64_t sample) const { return next < samples.size() && samples[next] == sample; }

  // The activation of `sample`, where the shard has rounded it; null: it has not.
  const char* TakeRounded(int64_t sample) {
    if (later == nullptr || later->row_dtype() != v1::BFLOAT16) return nullptr;
    if (!later->single_rows() || !Has(sample)) return nullptr;
    return later->SingleRow(static_cast<int64_t>(next++));
  }

  // The shard's sum of `sample`; null: it has none. `place`: where it wrote it, if it did.
  const float* Take(int64_t sample, int width, const float* place) {
    if (!Has(sample)) return nullptr;
    ++next;
    if (placed != nullptr && !placed->PassesOver(sample)) return place;
    if (later != nullptr) return MakeSum(row++, width);
    return rows + row++ * width;
  }

  // Sums that are made here, so many at a time that they stay in the cache.
  const float* MakeSum(int64_t index, int width) {
    if (index >= block_end) {
      const auto count = static_cast<int64_t>(samples.size());
      const int64_t most = std::max<int64_t>(1, kBlockBytes / (width * sizeof(float)));
      if (block == nullptr) {
        block = hwy::AllocateAligned<float>(std::min(most, count - index) * width);
      }
      block_begin = index;
      block_end = std::min(count, index + most);
      later->Sum(block_begin, block_end, block.get());
    }
    return block.get() + (index - block_begin) * width;
  }

  const absl::Span<const int32_t> samples;
  const shard::SumPlaces* const placed;  // null: the shard has written nothing in place
  const float* const rows;
  const shard::LaterSums* const later;
  size_t next;
  int64_t row;

  static constexpr int64_t kBlockBytes = int64_t{64} << 10;
  int64_t block_begin = 0, block_end = 0;  // indices in `samples`
  hwy::AlignedFreeUniquePtr<float[]> block;
};

// Walks over the samples of one feature and folds each over the shards.
class FeatureCombiner {
 public:
  // `results[i]`, `starts[i]`: of shard i.
  FeatureCombiner(absl::Span<const host::GatherResult> results,
                  absl::Span<const std::vector<FeatureStart>> starts, int feature, int stack,
                  int width)
      : width_(width), nodes_(results.size()), scratch_(results.size() * width) {
    for (size_t i = 0; i < results.size(); ++i) {
      walks_.emplace_back(results[i].stacks[stack], results[i].places.Find(stack),
                          starts[i][feature]);
    }
  }

  // The activation of `sample`, [width], if a shard has rounded it; null: none has. Before Fold.
  const char* TakeRounded(int64_t sample) {
    for (ShardWalk& walk : walks_) {
      if (const char* const rounded = walk.TakeRounded(sample)) return rounded;
    }
    return nullptr;
  }

  // The sum for `sample`, [width]; null if no shard has an entry. Samples must ascend from call to
  // call. `place`: of the sample's row, where a shard may have written its part.
  const float* Fold(int64_t sample, const float* place) {
    for (size_t i = 0; i < nodes_.size(); ++i) nodes_[i] = walks_[i].Take(sample, width_, place);
    for (size_t step = 1; step < nodes_.size(); step *= 2) {
      for (size_t i = 0; i + step < nodes_.size(); i += 2 * step)
        nodes_[i] = Add(nodes_[i], nodes_[i + step], i);
    }
    return nodes_[0];
  }

 private:
  // Partial sums start from +0 and so are never -0: leaving an absent one out gives the same bits
  // as adding zeros.
  const float* Add(const float* left, const float* right, size_t node) {
    if (right == nullptr) return left;
    if (left == nullptr) return right;
    float* sum = scratch_.data() + node * width_;
    for (int column = 0; column < width_; ++column) sum[column] = left[column] + right[column];
    return sum;
  }

  const int width_;
  std::vector<ShardWalk> walks_;
  std::vector<const float*> nodes_;
  std::vector<float> scratch_;
};

void WriteRow(const float* row, int64_t dim, v1::DataType dtype, char* to) {
  if (row == nullptr) {
    std::memset(to, 0, dim * ElementSize(dtype));
  } else if (dtype == v1::BFLOAT16) {
    shard::RoundToBfloat16(row, dim, to);
  } else if (row != reinterpret_cast<const float*>(to)) {
    std::memcpy(to, row, dim * sizeof(float));
  }
}

// The row of each of a feature's samples; null: it has none.
std::vector<const char*> FindSingleRows(absl::Span<const host::GatherResult> results,
                                        absl::Span<const std::vector<FeatureStart>> starts,
                                        int feature, int stack, int64_t first, int64_t samples) {
  std::vector<const char*> rows(samples);
  for (size_t s = 0; s < results.size(); ++s) {
    const shard::StackSums& sums = results[s].stacks[stack];
    for (size_t i = starts[s][feature].sample; i < sums.samples.size(); ++i) {
      const int64_t sample = sums.samples[i] - first;
      if (sample >= samples) break;
      rows[sample] = sums.later->SingleRow(static_cast<int64_t>(i));
    }
  }
  return rows;
}

// Whether shards have written each of a feature's samples where its activation belongs, and have
// returned no other part of one.
bool AllAreInPlace(absl::Span<const host::GatherResult> results,
                   absl::Span<const std::vector<FeatureStart>> starts, int feature, int stack,
                   int64_t first, int64_t samples) {
  int64_t in_place = 0;
  for (size_t s = 0; s < results.size(); ++s) {
    const shard::StackSums& sums = results[s].stacks[stack];
    if (sums.samples.empty()) continue;
    if (!sums.placed || !sums.sums.empty()) return false;
    const auto from = sums.samples.begin() + starts[s][feature].sample;
    in_place += std::lower_bound(from, sums.samples.end(), first + samples) - from;
  }
  return in_place == samples;
}

// `places`: those that were asked for, or null.
bool SumsFit(const shard::StackSums& sums, const shard::SumPlaces* places, int width,
             int64_t stack_samples) {
  int64_t last = -1;
  for (const int32_t sample : sums.samples) {
    if (sample <= last) return false;
    last = sample;
  }
  if (last >= stack_samples) return false;
  auto rows = static_cast<int64_t>(sums.samples.size());
  if (sums.placed) {
    if (places == nullptr) return false;
    rows = CountReturned(sums.samples, *places);
  }
  return static_cast<int64_t>(sums.sums.size()) == rows * width;
}

bool RowsFit(const shard::StackRows& rows, const shard::StackSpec& spec, v1::DataType dtype) {
  if (!rows.rounded) return rows.row_bytes == shard::RowBytes(spec);
  return dtype == v1::BFLOAT16 && rows.row_bytes == shard::RoundedRowBytes(spec);
}

}  // namespace

int64_t MaxGatherBytes(const ServedModel& model,
                       absl::Span<const preprocess::StackBatchView> stacks,
                       const shard::GatherPlaces& places) {
  int64_t bytes = 0;
  for (const preprocess::StackBatchView& view : stacks) {
    const int64_t entries = view.cells();
    const shard::StackSpec& stack = model.shard_stacks[view.stack];
    const auto width = static_cast<int64_t>(stack.embedding_dim);
    const int64_t samples = std::min<int64_t>(entries, view.sample_count);
    int64_t sum_rows = samples;
    const shard::SumPlaces* const placed = places.Find(view.stack);
    if (placed != nullptr && stack.result_mode != v1::UNIQUE_ROWS) {
      sum_rows = std::min(sum_rows, placed->CountPassedOver());
      bytes += kRoomAlignment + samples * sizeof(int32_t) + sum_rows * width * sizeof(float);
      continue;
    }
    const auto sum_bytes = static_cast<int64_t>(sizeof(int32_t) + width * sizeof(float));
    const int64_t sums = kRoomAlignment + sum_rows * sum_bytes;
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

absl::Status CheckGatherResult(const host::GatherResult& result, const ServedModel& model,
                               const preprocess::PreprocessedBatch& batch, v1::DataType dtype) {
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
        SumsFit(*sums++, result.places.Find(i), stacks[i].embedding_dim, batch.stack_samples(i))) {
      continue;
    }
    if (rows != result.rows.end() && rows->stack == i &&
        RowsFit(*rows++, model.shard_stacks[i], dtype)) {
      continue;
    }
    return absl::InternalError(
        absl::StrCat("the result of stack '", stacks[i].name, "' does not fit the batch"));
  }
  return absl::OkStatus();
}

absl::Status ArrangeUniqueRows(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                               int shard, BufferPool& pool, CpuPool& cpu,
                               host::GatherResult* result) {
  if (result->rows.empty()) return absl::OkStatus();
  const std::vector<preprocess::StackBatchView> views = batch.ShardView(shard);
  for (const shard::StackRows& rows : result->rows) {
    const shard::StackSpec& spec = model.shard_stacks[rows.stack];
    auto later =
        shard::LaterSums::Make(views[rows.stack], spec, model.plan.topology.sparsecores_per_shard,
                               {rows.rows, rows.rounded}, pool, cpu);
    if (!later.ok()) return absl::InternalError(later.status().message());
    shard::StackSums& sums = result->stacks.emplace_back();
    sums.stack = rows.stack;
    sums.samples = (*later)->samples();
    sums.rows_gathered = rows.rows_gathered;
    sums.later = *std::move(later);
  }
  std::sort(result->stacks.begin(), result->stacks.end(),
            [](const auto& a, const auto& b) { return a.stack < b.stack; });
  result->rows.clear();
  return absl::OkStatus();
}

std::optional<v1::DataType> TypeOfSingleRows(absl::Span<const host::GatherResult> results,
                                             int stack) {
  std::optional<v1::DataType> type;
  for (const host::GatherResult& result : results) {
    const shard::StackSums& sums = result.stacks[stack];
    if (sums.samples.empty()) continue;
    if (sums.later == nullptr || !sums.later->single_rows()) return std::nullopt;
    if (type.value_or(sums.later->row_dtype()) != sums.later->row_dtype()) return std::nullopt;
    type = sums.later->row_dtype();
  }
  return type;
}

Activations ActivationsIn(const SharedOutput& output, const ServedModel& model,
                          const preprocess::PreprocessedBatch& batch, v1::DataType dtype) {
  Activations activations;
  activations.dtype = dtype;
  activations.owner = output.memory;
  if (output.region.memory != nullptr) {
    activations.shared_bytes = output.layout.bytes;
    return activations;
  }
  for (int i = 0; i < model.config.features_size(); ++i) {
    const int64_t samples = batch.feature_samples()[i];
    const int64_t dim = model.TableOfFeature(i).embedding_dim();
    activations.features.push_back(
        {samples, dim,
         absl::MakeConstSpan(output.memory.get() + output.layout.offsets[i],
                             samples * dim * ElementSize(dtype))});
  }
  return activations;
}

void CombineActivations(absl::Span<const host::GatherResult> results, const ServedModel& model,
                        const preprocess::PreprocessedBatch& batch, v1::DataType dtype,
                        const SharedOutput& output, absl::Span<const int> order, CpuPool* cpu) {
  if (order.empty()) return;
  std::vector<std::vector<FeatureStart>> starts(results.size());
  ParallelFor(cpu, static_cast<int64_t>(results.size()),
              [&](int64_t i) { starts[i] = FindStarts(results[i], model, batch); });
  std::vector<std::optional<v1::DataType>> single(model.plan.stacks.size());
  for (size_t k = 0; k < single.size(); ++k) {
    single[k] = TypeOfSingleRows(results, static_cast<int>(k));
  }
  const auto combine = [&](int64_t index) {
    const int i = order[index];
    const int stack = model.plan.feature_at[i].stack;
    const int64_t first = batch.feature_sample_begin()[i];
    const int64_t samples = batch.feature_samples()[i];
    const int64_t dim = model.TableOfFeature(i).embedding_dim();
    char* to = output.memory.get() + output.layout.offsets[i];
    if (single[stack].has_value()) {
      const auto rows = FindSingleRows(results, starts, i, stack, first, samples);
      shard::CopySingleRows(
          {rows.data(), *single[stack], samples, dim, to, dtype, output.layout.strides[i]});
    } else if (!AllAreInPlace(results, starts, i, stack, first, samples)) {
      FeatureCombiner combiner(results, starts, i, stack, model.plan.stacks[stack].embedding_dim);
      for (int64_t sample = first; sample < first + samples; ++sample) {
        if (const char* const rounded = combiner.TakeRounded(sample)) {
          std::memcpy(to, rounded, dim * ElementSize(dtype));
        } else {
          WriteRow(combiner.Fold(sample, reinterpret_cast<const float*>(to)), dim, dtype, to);
        }
        to += output.layout.strides[i];
      }
    }
  };
  ParallelFor(cpu, static_cast<int64_t>(order.size()), combine);
}

}  // namespace emberd::step
