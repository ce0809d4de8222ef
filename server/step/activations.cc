#include "server/step/activations.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "absl/strings/str_cat.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "emberd/v1/batch.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "hwy/aligned_allocator.h"
#include "preprocess/batch/sort_and_merge.h"
#include "server/rpc/message.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::step {

// ---- Where activations lie

namespace {

// The canonical sample of each sample id of a slot.
std::vector<int32_t> CanonicalSamples(absl::Span<const preprocess::SampleSpan> spans) {
  std::vector<int32_t> canonical;
  for (const preprocess::SampleSpan& span : spans) {
    canonical.resize(span.slot_begin + span.count);
    std::iota(canonical.end() - span.count, canonical.end(), span.sample_begin);
  }
  return canonical;
}

bool IsWhole(const preprocess::StackPlan& stack) {
  return std::all_of(stack.tables.begin(), stack.tables.end(),
                     [&](const auto& table) { return table.embedding_dim == stack.embedding_dim; });
}

// In the order of `order`: each feature from a multiple of 64 bytes on; `concat`: side by side,
// with as many samples as the first has. `samples`: by index in the config.
ActivationLayout LayOutActivations(const ServedModel& model, absl::Span<const int64_t> samples,
                                   absl::Span<const int> order, v1::DataType dtype, bool concat) {
  ActivationLayout layout;
  layout.offsets.resize(samples.size());
  layout.strides.resize(samples.size());
  uint64_t end = 0;
  for (const int feature : order) {
    const size_t row = model.TableOfFeature(feature).embedding_dim() * ElementSize(dtype);
    layout.offsets[feature] = end;
    layout.strides[feature] = row;
    end += concat ? row : AlignTensor(samples[feature] * row);
  }
  if (concat) {
    for (size_t& stride : layout.strides) stride = end;
    end *= order.empty() ? 0 : samples[order.front()];
  }
  layout.bytes = end;
  return layout;
}

}  // namespace

std::shared_ptr<const SharedOutput> TakeOutput(const ServedModel& model,
                                               absl::Span<const int64_t> samples,
                                               v1::DataType dtype) {
  std::vector<int> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  auto output = std::make_shared<SharedOutput>();
  output->layout = LayOutActivations(model, samples, order, dtype, /*concat=*/false);
  const size_t bytes = AlignTensor(std::max<size_t>(output->layout.bytes, 1));
  output->memory.reset(static_cast<char*>(std::aligned_alloc(kTensorAlignment, bytes)), std::free);
  return output;
}

absl::StatusOr<std::shared_ptr<const SharedOutput>> FindSharedOutput(const RegionServer* regions,
                                                                     const v1::SharedLookup& shared,
                                                                     const LookupInput& input,
                                                                     const ServedModel& model) {
  if (!shared.has_activations()) return nullptr;
  const v1::SharedBlock& block = shared.activations();
  if (block.offset() % kTensorAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat("shared.activations.offset is ", block.offset(),
                                                   "; it must be a multiple of 64"));
  }
  std::vector<int64_t> samples;
  for (const preprocess::FeatureInput& feature : input.features) {
    samples.push_back(preprocess::SampleCount(feature));
  }
  for (const int feature : input.order) {
    const int first = input.order.front();
    if (!shared.concat() || samples[feature] == samples[first]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "shared.concat: feature '", model.config.features(first).name(), "' has ", samples[first],
        " samples, and feature '", model.config.features(feature).name(), "' has ",
        samples[feature], "; they must have the same number"));
  }
  auto output = std::make_shared<SharedOutput>();
  output->layout =
      LayOutActivations(model, samples, input.order, input.activation_dtype, shared.concat());
  if (output->layout.bytes == 0) return nullptr;  // there is nothing to write
  if (block.size() < output->layout.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("shared.activations.size is ", block.size(),
                                                   "; the activations need ", output->layout.bytes,
                                                   " bytes"));
  }
  ASSIGN_OR_RETURN(output->memory, FindBlock(regions, block, "shared.activations"));
  output->region = {block.region(), regions->Region(block.region())};
  if (output->region.memory == nullptr) {  // given back just now
    return absl::FailedPreconditionError(
        "shared.activations: the client has given the region back");
  }
  return output;
}

std::vector<shard::SumPlaces> PlacesOfSums(const ServedModel& model,
                                           const preprocess::PreprocessedBatch& batch,
                                           v1::DataType dtype, const SharedOutput& output) {
  std::vector<shard::SumPlaces> all;
  if (dtype != v1::FLOAT32) return all;
  for (size_t k = 0; k < model.plan.stacks.size(); ++k) {
    const preprocess::StackPlan& stack = model.plan.stacks[k];
    if (!IsWhole(stack)) continue;
    shard::SumPlaces& places = all.emplace_back();
    places.stack = static_cast<int>(k);
    for (const preprocess::FeaturePlan& feature : stack.features) {
      const int f = feature.feature;
      char* const first = output.memory.get() + output.layout.offsets[f];
      places.features.push_back({reinterpret_cast<float*>(first), stack.embedding_dim,
                                 static_cast<int64_t>(output.layout.strides[f] / sizeof(float)),
                                 batch.feature_sample_begin()[f], batch.feature_samples()[f]});
    }
  }
  return all;
}

void PassOver(const preprocess::StackBatchView& view, shard::SumPlaces* places) {
  std::vector<uint32_t>& bits = places->passed_over;
  bits.resize((int64_t{view.sample_count} + 31) / 32);
  for (int slot = 0; slot < view.slots; ++slot) {
    const std::vector<int32_t> canonical = CanonicalSamples(view.spans[slot]);
    for (int m = 0; m < view.minibatches; ++m) {
      const preprocess::CsrSegmentView& segment = view.segments[slot * view.minibatches + m];
      int64_t begin = segment.base;
      for (const int32_t end : segment.row_ends) {
        for (int64_t i = begin; i < end; ++i) {
          const int32_t sample = canonical[segment.sample_ids[i - segment.base]];
          bits[sample / 32] |= 1u << (sample % 32);
        }
        begin = preprocess::AlignCsr(end);
      }
    }
  }
}

// ---- What the shards answer, and the activations that it makes

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

// The type of the rows, if all shards have answered with rows of one type that are the sums of
// samples (LaterSums::single_rows). The results have passed ArrangeUniqueRows.
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

// ---- The answer's bytes

namespace {

// One FeatureActivation as a field of a message.
class ActivationField {
 public:
  // `output` must outlive it. `feature`: index in the config. `field`: its number in the message.
  ActivationField(const LookupOutput& output, int feature, int field)
      : data_{absl::string_view(output.activations.features[feature].bytes.data(),
                                output.activations.features[feature].bytes.size()),
              output.activations.owner} {
    v1::FeatureActivation activation;
    activation.set_feature(output.model->config.features(feature).name());
    v1::Tensor tensor;
    tensor.set_dtype(output.activations.dtype);
    const int64_t samples = output.activations.features[feature].samples;
    const auto shape = output.model->ActivationShape(feature, samples);
    tensor.mutable_shape()->Assign(shape.begin(), shape.end());
    head_ = rpc::BeginFields(
        {{field, activation.SerializeAsString()},
         {v1::FeatureActivation::kActivationFieldNumber, tensor.SerializeAsString()},
         {v1::Tensor::kDataFieldNumber, ""}},
        data_.bytes.size());
  }

  // Bytes of the whole field, tag included.
  size_t size() const { return head_.size() + data_.bytes.size(); }

  // The elements are referenced.
  void AppendTo(rpc::WireEncoder* encoder) const {
    encoder->Raw(head_);
    encoder->Raw(data_);
  }

 private:
  const rpc::SharedBytes data_;
  std::string head_;  // the field without the elements, with which it ends
};

// Cuts features into messages of about 1 MiB: each but the last ends with the activation that
// brings it to that size. At least one.
std::vector<absl::Span<const int>> CutIntoMessages(const LookupOutput& output,
                                                   absl::Span<const int> features) {
  std::vector<absl::Span<const int>> messages;
  size_t count = 0, bytes = 0;  // of the message that is next
  while (count < features.size()) {
    if (bytes >= rpc::kPartBytes) {
      messages.push_back(features.first(count));
      features.remove_prefix(std::exchange(count, 0));
      bytes = 0;
    }
    bytes += output.activations.features[features[count++]].bytes.size();
  }
  messages.push_back(features);
  return messages;
}

// A TrainResponse with a lookup; `head`: the small fields of its result.
grpc::ByteBuffer EncodeMessage(const v1::TrainLookupResult& head, const LookupOutput& output,
                               absl::Span<const int> features) {
  const std::string small = head.SerializeAsString();
  size_t size = small.size();
  std::vector<ActivationField> activations;
  for (const int feature : features) {
    activations.emplace_back(output, feature, v1::TrainLookupResult::kActivationsFieldNumber);
    size += activations.back().size();
  }
  rpc::WireEncoder encoder;
  encoder.BeginField(v1::TrainResponse::kLookupFieldNumber, size);
  encoder.Raw(small);
  for (const ActivationField& activation : activations) activation.AppendTo(&encoder);
  return encoder.Finish();
}

}  // namespace

grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output) {
  using Response = v1::LookupResponse;
  rpc::WireEncoder encoder;
  if (output.batch_handle != 0) {
    encoder.Fixed64Field(Response::kBatchHandleFieldNumber, output.batch_handle);
  }
  if (output.activations.shared_bytes > 0) {
    encoder.VarintField(Response::kSharedBytesFieldNumber, output.activations.shared_bytes);
  } else {
    for (const int feature : output.order) {
      ActivationField(output, feature, Response::kActivationsFieldNumber).AppendTo(&encoder);
    }
  }
  encoder.BytesField(Response::kStatisticsFieldNumber, output.statistics.SerializeAsString());
  return encoder.Finish();
}

std::string EncodeLookupText(const LookupOutput& output) {
  std::vector<grpc::Slice> slices;
  std::string text;
  const grpc::ByteBuffer buffer = EncodeLookupResponse(output);
  // Fails for compressed bytes only.
  if (!buffer.Dump(&slices).ok()) return text;
  text.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const LookupOutput& output,
                                               const v1::StepTimes& times) {
  absl::Span<const int> features;
  if (output.activations.shared_bytes == 0) features = absl::MakeConstSpan(output.order);
  v1::TrainLookupResult last;
  last.set_step(step);
  last.set_shared_bytes(output.activations.shared_bytes);
  *last.mutable_statistics() = output.statistics;
  *last.mutable_times() = times;
  v1::TrainLookupResult head;
  head.set_step(step);
  head.set_continues(true);
  std::deque<grpc::ByteBuffer> messages;
  const std::vector<absl::Span<const int>> cut = CutIntoMessages(output, features);
  for (const absl::Span<const int>& some : cut) {
    messages.push_back(EncodeMessage(&some == &cut.back() ? last : head, output, some));
  }
  return messages;
}

}  // namespace emberd::step
