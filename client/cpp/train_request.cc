#include "client/cpp/train_request.h"

#include <limits>
#include <utility>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/support/slice.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace {

// Tag and length of a field of `length` bytes.
std::string FieldHead(int field, size_t length) {
  constexpr uint32_t kLengthDelimited = 2;
  std::string head;
  google::protobuf::io::StringOutputStream to(&head);
  google::protobuf::io::CodedOutputStream output(&to);
  output.WriteTag(static_cast<uint32_t>(field) << 3 | kLengthDelimited);
  output.WriteVarint32(static_cast<uint32_t>(length));
  output.Trim();
  return head;
}

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

struct Payload {
  const void* bytes = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
};

// The elements as they travel. Rows that do not lie one after the other are put together here,
// once.
Payload MakePayload(const FeatureGradient& gradient, int64_t dim,
                    const std::shared_ptr<const void>& memory, WireType type, BufferPool* pool) {
  if (type == WireType::kFloat32 && memory != nullptr && IsTogether(gradient, dim)) {
    return {gradient.values.data(), gradient.values.size() * sizeof(float), memory};
  }
  const size_t size = gradient.samples * dim * ElementBytes(type);
  std::shared_ptr<float> own = TakeFloats(pool, (size + sizeof(float) - 1) / sizeof(float));
  CopyGradient(gradient, dim, type, reinterpret_cast<char*>(own.get()));
  return {own.get(), size, own};
}

// Room in shared memory for what the request sends and what its answer brings, as far as there is
// some.
std::optional<BlockWriter> TakeBlocks(SharedMemory* memory, absl::Span<const FeatureIds> features,
                                      ExpectedLookup* expected) {
  if (memory == nullptr) return std::nullopt;
  const absl::Time deadline = SteadyNow() + kSendPatience;
  expected->activations = memory->Take(SharedBytes(*expected), deadline);
  expected->ids = memory->Take(BlockBytes(features), deadline);
  if (expected->ids == nullptr) return std::nullopt;
  return BlockWriter(expected->ids);
}

void NameBlocks(const ExpectedLookup& expected, const std::optional<BlockWriter>& ids,
                v1::TrainLookup* lookup) {
  if (ids.has_value()) *lookup->mutable_shared()->mutable_ids() = ids->place();
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
  std::string tensor_head = tensor.SerializeAsString();
  tensor_head += FieldHead(v1::Tensor::kDataFieldNumber, bytes);
  std::string gradient_head = gradient.SerializeAsString();
  gradient_head += FieldHead(v1::FeatureGradient::kGradientFieldNumber, tensor_head.size() + bytes);
  gradient_head += tensor_head;
  return FieldHead(v1::TrainUpdate::kGradientsFieldNumber, gradient_head.size() + bytes) +
         gradient_head;
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// No message may have more bytes than protobuf can count.
absl::Status CheckTensorBytes(const std::string& feature, size_t bytes) {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max() - (1 << 20);
  if (bytes <= kMost) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("feature \"", feature, "\" has ", bytes,
                                                   " bytes; a message can have at most ", kMost));
}

}  // namespace

// One TrainRequest with an update, made of pieces of which the large ones stay where they are.
class UpdateMessage {
 public:
  void Add(const std::string& bytes) {
    slices_.emplace_back(bytes);
    size_ += bytes.size();
  }
  void Add(const void* bytes, size_t size, std::shared_ptr<const void> owner) {
    if (size == 0) return;
    auto* held = new std::shared_ptr<const void>(std::move(owner));
    slices_.emplace_back(const_cast<void*>(bytes), size, ReleaseOwner, held);
    size_ += size;
  }
  size_t size() const { return size_; }

  // `rest`: the fields that are not gradients.
  grpc::ByteBuffer Finish(const v1::TrainUpdate& rest) {
    Add(rest.SerializeAsString());
    slices_.insert(slices_.begin(),
                   grpc::Slice(FieldHead(v1::TrainRequest::kUpdateFieldNumber, size_)));
    grpc::ByteBuffer message(slices_.data(), slices_.size());
    slices_.clear();
    size_ = 0;
    return message;
  }

 private:
  std::vector<grpc::Slice> slices_;
  size_t size_ = 0;
};

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
  return Serialize(request);
}

absl::StatusOr<std::deque<grpc::ByteBuffer>> EncodeTrainLookup(
    const Model& model, int64_t step, absl::Span<const FeatureIds> features, WireType activations,
    bool concat, ExpectedLookup* expected, SharedMemory* memory) {
  std::deque<grpc::ByteBuffer> messages;
  ASSIGN_OR_RETURN(*expected, ExpectLookup(model, features, activations, concat));
  expected->step = step;
  std::optional<BlockWriter> writer = TakeBlocks(memory, features, expected);

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
      if (messages.empty()) NameBlocks(*expected, writer, request.mutable_lookup());
      messages.push_back(Serialize(request));
      begin();
    }
    *request.mutable_lookup()->add_features() = std::move(ids);
    bytes += size;
  }
  if (messages.empty()) NameBlocks(*expected, writer, request.mutable_lookup());
  messages.push_back(Serialize(request));
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
      const std::string bytes = placed.SerializeAsString();
      encoder.gradients_.push_back(
          {.head = FieldHead(v1::TrainUpdate::kGradientsFieldNumber, bytes.size()) + bytes});
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
  UpdateMessage message;
  const auto is_too_much = [&message](size_t bytes) {
    return message.size() > 0 && message.size() + bytes > kTrainMessageBytes;
  };
  for (; next_ < gradients_.size(); ++next_) {
    const Gradient& gradient = gradients_[next_];
    if (is_too_much(gradient.bytes)) break;
    message.Add(gradient.head);
    if (gradient.values == nullptr) continue;
    Payload payload = MakePayload(*gradient.values, gradient.dim, options_.memory, type_, pool_);
    message.Add(payload.bytes, payload.size, std::move(payload.owner));
  }
  ended_ = next_ == gradients_.size();
  return message.Finish(Rest(ended_));
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
