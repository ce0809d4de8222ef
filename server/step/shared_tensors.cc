#include "server/step/shared_tensors.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include <google/protobuf/message.h>

#include "absl/strings/str_cat.h"
#include "base/buffers.h"
#include "base/status.h"
#include "preprocess/batch/sort_and_merge.h"

namespace emberd::step {
namespace {

// Takes the tensors of a request out of a block, one after the other.
class BlockReader {
 public:
  BlockReader(const char* data, uint64_t size) : data_(data), size_(size) {}

  absl::Status Copy(v1::Tensor* tensor, const std::string& path) {
    ASSIGN_OR_RETURN(const int64_t bytes, ShapeBytes(*tensor, path));
    if (!tensor->data().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ".data has ", tensor->data().size(),
                       " bytes; it must be empty where shared.ids is set"));
    }
    const uint64_t begin = AlignTensor(next_);
    if (begin > size_ || static_cast<uint64_t>(bytes) > size_ - begin) {
      return absl::InvalidArgumentError(absl::StrCat("shared.ids.size is ", size_, "; ", path,
                                                     " of ", bytes, " bytes goes beyond it"));
    }
    tensor->mutable_data()->assign(data_ + begin, bytes);
    next_ = begin + bytes;
    return absl::OkStatus();
  }

 private:
  const char* const data_;
  const uint64_t size_;
  uint64_t next_ = 0;
};

// All tensors of a message, which lie in the block in the order of its fields.
absl::Status CopyTensors(BlockReader* from, google::protobuf::Message* message,
                         const std::string& path) {
  if (auto* const tensor = dynamic_cast<v1::Tensor*>(message)) return from->Copy(tensor, path);
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  message->GetReflection()->ListFields(*message, &fields);
  for (const auto* const field : fields) {
    if (field->message_type() == nullptr) continue;
    RETURN_IF_ERROR(CopyTensors(from, message->GetReflection()->MutableMessage(message, field),
                                absl::StrCat(path, ".", field->name())));
  }
  return absl::OkStatus();
}

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

absl::StatusOr<std::shared_ptr<char>> FindBlock(const RegionServer* regions,
                                                const v1::SharedBlock& block,
                                                absl::string_view path) {
  if (regions == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path,
                     " is set, but this coordinator shares no memory; send the data in the "
                     "message"));
  }
  auto found = regions->Find(block.region(), block.offset(), block.size());
  if (!found.ok()) return Annotate(found.status(), path);
  return found;
}

absl::StatusOr<rpc::CallContext::Room> MakeRoomForSharedIds(const RegionServer* regions,
                                                            const v1::LookupRequest& request,
                                                            const rpc::CallContext* context) {
  if (!request.shared().has_ids()) return nullptr;
  const v1::SharedBlock& block = request.shared().ids();
  RETURN_IF_ERROR(FindBlock(regions, block, "shared.ids").status());
  return context->MakeRoom(static_cast<int64_t>(block.size()), "the ids");
}

absl::Status CopySharedIds(const RegionServer* regions, v1::LookupRequest* request) {
  if (!request->shared().has_ids()) return absl::OkStatus();
  const v1::SharedBlock& block = request->shared().ids();
  ASSIGN_OR_RETURN(const auto memory, FindBlock(regions, block, "shared.ids"));
  BlockReader reader(memory.get(), block.size());
  for (v1::FeatureIds& feature : *request->mutable_features()) {
    RETURN_IF_ERROR(
        CopyTensors(&reader, &feature, absl::StrCat("feature '", feature.feature(), "'")));
  }
  request->mutable_shared()->clear_ids();
  return absl::OkStatus();
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

}  // namespace emberd::step
