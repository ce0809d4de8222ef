#include "client/cpp/train_request.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace {

// The elements as they travel. Rows that do not lie one after the other are put together here,
// once.
rpc::SharedBytes MakePayload(const FeatureGradient& gradient, int64_t dim,
                             const std::shared_ptr<const void>& memory, WireType type,
                             BufferPool* pool) {
  if (type == WireType::kFloat32 && memory != nullptr && IsTogether(gradient, dim)) {
    const auto* const bytes = reinterpret_cast<const char*>(gradient.values.data());
    return {{bytes, gradient.values.size() * sizeof(float)}, memory};
  }
  const size_t size = gradient.samples * dim * ElementBytes(type);
  std::shared_ptr<float> own = TakeFloats(pool, (size + sizeof(float) - 1) / sizeof(float));
  char* const bytes = reinterpret_cast<char*>(own.get());
  CopyGradient(gradient, dim, type, bytes);
  return {{bytes, size}, own};
}

// Room in shared memory for what the request sends and what its answer brings, as far as there is
// some.
std::optional<BlockWriter> TakeBlocks(SharedMemory* memory, size_t id_bytes,
                                      ExpectedLookup* expected) {
  if (memory == nullptr) return std::nullopt;
  const absl::Time deadline = SteadyNow() + kSendPatience;
  expected->activations = memory->Take(SharedBytes(*expected), deadline);
  expected->ids = memory->Take(id_bytes, deadline);
  if (expected->ids == nullptr) return std::nullopt;
  return BlockWriter(expected->ids);
}

// In the first message, whose blocks hold what belongs to those that follow, too.
void NameBlocks(const ExpectedLookup& expected, size_t id_bytes, v1::TrainLookup* lookup) {
  if (expected.ids != nullptr) {
    SetPlace(*expected.ids, expected.ids->offset(), id_bytes,
             lookup->mutable_shared()->mutable_ids());
  }
  if (expected.activations == nullptr) return;
  v1::SharedLookup* const shared = lookup->mutable_shared();
  SetPlace(*expected.activations, expected.activations->offset(), SharedBytes(expected),
           shared->mutable_activations());
  shared->set_concat(expected.concat);
}

// `gradient` with the tensor, [rows, dim], but for the tensor's bytes, with which it ends.
std::string GradientHead(const v1::FeatureGradient& gradient, int64_t rows, int64_t dim,
                         WireType type, size_t bytes) {
  v1::Tensor tensor;
  SetHead(WireDataType(type), {rows, dim}, &tensor);
  return rpc::BeginFields({{v1::TrainUpdate::kGradientsFieldNumber, gradient.SerializeAsString()},
                           {v1::FeatureGradient::kGradientFieldNumber, tensor.SerializeAsString()},
                           {v1::Tensor::kDataFieldNumber, ""}},
                          bytes);
}

// No message may have more bytes than protobuf can count.
absl::Status CheckTensorBytes(const std::string& feature, size_t bytes) {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max() - (1 << 20);
  if (bytes <= kMost) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("feature \"", feature, "\" has ", bytes,
                                                   " bytes; a message can have at most ", kMost));
}

}  // namespace

grpc::ByteBuffer EncodeTrainStart(const Model& model, const TrainOptions& options) {
  v1::TrainRequest request;
  v1::TrainStart* start = request.mutable_start();
  start->set_model_id(model.id);
  start->set_group(options.group);
  start->set_rank(options.rank);
  v1::GroupOptions* group = start->mutable_options();
  group->set_size(options.size);
  switch (options.consistency) {
    case Consistency::kSync:
      group->set_consistency(v1::SYNC);
      break;
    case Consistency::kAsync:
      group->set_consistency(v1::ASYNC);
      break;
    case Consistency::kBounded:
      group->set_consistency(v1::BOUNDED);
      break;
  }
  group->set_staleness_bound(options.staleness_bound);
  group->set_pipelined(options.pipelined);
  group->set_first_step(options.first_step);
  group->set_step_timeout_ms(absl::ToInt64Milliseconds(options.step_timeout));
  return *rpc::EncodeMessage(request);  // it is small
}

absl::StatusOr<std::deque<grpc::ByteBuffer>> EncodeTrainLookup(
    const Model& model, int64_t step, absl::Span<const FeatureIds> features, WireType activations,
    bool concat, ExpectedLookup* expected, SharedMemory* memory) {
  std::deque<grpc::ByteBuffer> messages;
  ASSIGN_OR_RETURN(*expected, ExpectLookup(model, features, activations, concat));
  expected->step = step;
  const size_t id_bytes = BlockBytes(features);
  std::optional<BlockWriter> writer = TakeBlocks(memory, id_bytes, expected);

  v1::TrainRequest request;
  size_t bytes = 0;  // of ids in `request`
  const auto begin = [&] {
    request.Clear();
    request.mutable_lookup()->set_step(step);
    request.mutable_lookup()->set_activation_dtype(WireDataType(activations));
    bytes = 0;
  };
  begin();
  for (size_t i = 0; i < features.size(); ++i) {
    const FeatureInfo& info = **FindFeature(model, expected->features[i].name, i);
    v1::FeatureIds ids;
    RETURN_IF_ERROR(
        EncodeFeature(features[i], info, &ids, writer.has_value() ? &*writer : nullptr));
    const size_t size = ids.ByteSizeLong();
    RETURN_IF_ERROR(CheckTensorBytes(ids.feature(), size));
    if (bytes > 0 && bytes + size > kTrainMessageBytes) {
      request.mutable_lookup()->set_continues(true);
      if (messages.empty()) NameBlocks(*expected, id_bytes, request.mutable_lookup());
      ASSIGN_OR_RETURN(messages.emplace_back(), rpc::EncodeMessage(request));
      begin();
    }
    *request.mutable_lookup()->add_features() = std::move(ids);
    bytes += size;
  }
  if (messages.empty()) NameBlocks(*expected, id_bytes, request.mutable_lookup());
  ASSIGN_OR_RETURN(messages.emplace_back(), rpc::EncodeMessage(request));
  return messages;
}

absl::StatusOr<UpdateEncoder> UpdateEncoder::Make(const Model& model, int64_t step,
                                                  absl::Span<const FeatureGradient> gradients,
                                                  const UpdateOptions& options, WireType type,
                                                  BufferPool* pool, SharedGradients* shared) {
  if (options.skip && !gradients.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("skip is true in step ", step, ", but ", gradients.size(),
                     " gradients are given; a skipped step has none"));
  }
  ASSIGN_OR_RETURN(const std::vector<int64_t> dims, CheckGradients(model, gradients));
  if (shared != nullptr) shared->Reserve(gradients, dims, type, SteadyNow() + kSendPatience);
  UpdateEncoder encoder(step, options, type, pool);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const FeatureGradient& gradient = gradients[i];
    const std::string name(gradient.feature);
    const int64_t dim = dims[i];
    if (v1::FeatureGradient placed;
        shared != nullptr && shared->Put(gradient, dim, type, &placed)) {
      placed.set_feature(name);
      rpc::WireEncoder head;
      head.BytesField(v1::TrainUpdate::kGradientsFieldNumber, placed.SerializeAsString());
      encoder.gradients_.push_back({.head = head.FinishText()});
      continue;
    }
    const size_t size = gradient.samples * dim * ElementBytes(type);
    RETURN_IF_ERROR(CheckTensorBytes(name, size));
    v1::FeatureGradient sent;
    sent.set_feature(name);
    encoder.gradients_.push_back(
        {&gradient, dim, size, GradientHead(sent, gradient.samples, dim, type, size)});
  }
  return encoder;
}

std::optional<grpc::ByteBuffer> UpdateEncoder::Next() {
  if (ended_) return std::nullopt;
  size_t size = 0;
  size_t end = next_;
  for (; end < gradients_.size(); ++end) {
    const Gradient& gradient = gradients_[end];
    if (size > 0 && size + gradient.bytes > kTrainMessageBytes) break;
    size += gradient.head.size() + gradient.bytes;
  }
  ended_ = end == gradients_.size();
  const std::string rest = Rest(ended_).SerializeAsString();
  rpc::WireEncoder message;
  message.BeginField(v1::TrainRequest::kUpdateFieldNumber, size + rest.size());
  for (; next_ < end; ++next_) {
    const Gradient& gradient = gradients_[next_];
    message.Raw(gradient.head);
    if (gradient.values == nullptr) continue;
    message.Raw(MakePayload(*gradient.values, gradient.dim, options_.memory, type_, pool_));
  }
  message.Raw(rest);
  return message.Finish();
}

// The fields that are not gradients.
v1::TrainUpdate UpdateEncoder::Rest(bool last) const {
  v1::TrainUpdate rest;
  rest.set_step(step_);
  rest.set_continues(!last);
  if (!last) return rest;
  for (const StepHyperparameters& parameters : options_.hyperparameters) {
    EncodeHyperparameters(parameters, rest.add_hyperparameters());
  }
  rest.set_checkpoint(options_.checkpoint);
  rest.set_skip(options_.skip);
  return rest;
}

}  // namespace emberd::client
