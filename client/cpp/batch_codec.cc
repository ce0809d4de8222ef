#include "client/cpp/batch_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include <grpcpp/support/byte_buffer.h>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/floats.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/train_stream.h"
#include "config/config.h"

namespace emberd::client {

static_assert(std::endian::native == std::endian::little, "tensors travel in memory order");

namespace {

// The elements of a tensor, which has the feature's shape, to where they are read.
void CopyElements(const v1::Tensor& tensor, WireType type, const ExpectedLookup::Feature& feature,
                  float* to) {
  const int64_t runs = feature.row_stride == feature.dim ? 1 : feature.samples;
  const size_t run = runs == 1 ? feature.span() : feature.dim;
  const char* from = tensor.data().data();
  for (int64_t i = 0; i < runs; ++i) {
    if (type == WireType::kFloat32) {
      std::memcpy(to, from, run * sizeof(float));
    } else {
      FromBfloat16Bytes(from, absl::MakeSpan(to, run));
    }
    from += run * ElementBytes(type);
    to += feature.row_stride;
  }
}

void FromBfloat16Block(const ExpectedLookup& expected, float* floats) {
  const char* from = expected.activations->data();
  if (expected.concat) {
    return FromBfloat16Bytes(from, absl::MakeSpan(floats, expected.floats));
  }
  for (const ExpectedLookup::Feature& feature : expected.features) {
    FromBfloat16Bytes(from, absl::MakeSpan(floats + feature.offset, feature.span()));
    from += AlignTensor(feature.span() * ElementBytes(expected.type));
  }
}

Activation ActivationIn(const ExpectedLookup::Feature& feature, const float* memory) {
  return {feature.name, feature.samples, feature.dim,
          absl::MakeConstSpan(memory + feature.offset, feature.span()), feature.row_stride};
}

template <typename T>
void SetData(absl::Span<const T> values, v1::Tensor* tensor, BlockWriter* writer) {
  if (writer != nullptr) {
    writer->Write(values.data(), values.size() * sizeof(T));
  } else {
    tensor->set_data(values.data(), values.size() * sizeof(T));
  }
}

// Whether all dimensions but the last make so many rows, and the last is `dim`.
bool HasRows(const v1::Tensor& tensor, int64_t rows, int64_t dim) {
  const int last = tensor.shape_size() - 1;
  if (last < 1 || tensor.shape(last) != dim) return false;
  int64_t here = 1;
  for (int d = 0; d < last; ++d) {
    const int64_t extent = tensor.shape(d);
    if (extent < 0 || (extent > 0 && here > rows / extent)) return false;
    here *= extent;
  }
  return here == rows;
}

// What a server sent must be [rows, dim] of `type`.
absl::Status CheckTensor(const v1::Tensor& tensor, int64_t rows, int64_t dim, WireType type) {
  const v1::DataType expected = WireDataType(type);
  if (tensor.dtype() != expected) {
    return absl::InternalError(absl::StrCat("dtype: the server sent ",
                                            v1::DataType_Name(tensor.dtype()), "; ",
                                            v1::DataType_Name(expected), " was expected"));
  }
  if (!HasRows(tensor, rows, dim)) {
    return absl::InternalError(absl::StrCat("shape: the server sent [",
                                            absl::StrJoin(tensor.shape(), ", "), "]; [", rows, ", ",
                                            dim, "] was expected"));
  }
  const size_t size = tensor.data().size();
  if (absl::int128(rows) * dim * ElementBytes(type) == absl::int128(size)) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("data: the server sent ", size, " bytes, which do not fill that shape"));
}

// The floats in `expected.activations`, where the server has written `bytes` bytes, and which
// feature's they are. INTERNAL if `bytes` is not what it should be. The pool is needed for
// bfloat16.
absl::StatusOr<std::shared_ptr<float>> ReadShared(const ExpectedLookup& expected, uint64_t bytes,
                                                  BufferPool* pool,
                                                  std::vector<Activation>* activations) {
  const std::shared_ptr<SharedBlock>& block = expected.activations;
  const size_t all = SharedBytes(expected);
  if (block == nullptr || bytes != all) {
    return absl::InternalError(absl::StrCat("shared_bytes: the server sent ", bytes, "; ",
                                            block == nullptr ? 0 : all, " was expected"));
  }
  std::shared_ptr<float> floats;
  if (expected.type == WireType::kFloat32) {
    floats = {block, reinterpret_cast<float*>(block->data())};
  } else {
    floats = TakeFloats(pool, expected.floats);
    FromBfloat16Block(expected, floats.get());
  }
  for (const ExpectedLookup::Feature& feature : expected.features) {
    activations->push_back(ActivationIn(feature, floats.get()));
  }
  return floats;
}

absl::Status Bad(const std::string& feature, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("feature \"", feature, "\": ", what));
}

// The greatest number if they cannot be counted.
int64_t Elements(absl::Span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(elements, extent, &elements)) {
      elements = std::numeric_limits<int64_t>::max();
    }
  }
  return elements;
}

// Without samples, if the server will refuse the shape.
config::DenseShape ReadShape(absl::Span<const int64_t> ids, const FeatureInfo& info) {
  return config::SamplesOf(ids, info.output_shape).value_or(config::DenseShape());
}

absl::Status EncodeIds(const DenseIds& ids, const FeatureInfo& info, v1::FeatureIds* message,
                       BlockWriter* writer) {
  const int64_t size = Size(ids.ids);
  std::vector<int64_t> shape = ids.shape;
  const int64_t k = shape.empty() ? ids.ids_per_sample : ReadShape(shape, info).ids_per_sample;
  if (k < 1 || size % k != 0) {
    return Bad(
        info.name,
        absl::StrCat("ids_per_sample: ", k,
                     " is not allowed; it must be >= 1 and divide the number of ids (", size, ")"));
  }
  if (shape.empty()) shape = {size / k};
  if (ids.shape.empty() && k > 1) {
    for (size_t d = 1; d < info.output_shape.size(); ++d) {
      shape[0] /= info.output_shape[d];
      shape.push_back(info.output_shape[d]);
    }
    shape.push_back(k);
  }
  if (Elements(shape) != size) {
    return Bad(info.name, absl::StrCat("ids: ", size, " are given; shape [",
                                       absl::StrJoin(shape, ", "), "] needs ", Elements(shape),
                                       ids.shape.empty() ? ", as output_shape says" : ""));
  }
  EncodeInts(ids.ids, shape, message->mutable_dense()->mutable_ids(), writer);
  return absl::OkStatus();
}

absl::Status EncodeIds(const SparseIds& ids, const FeatureInfo& info, v1::FeatureIds* message,
                       BlockWriter* writer) {
  const int64_t size = Size(ids.values);
  if (Size(ids.indices) != 2 * size) {
    return Bad(info.name,
               absl::StrCat("indices: ", Size(ids.indices),
                            " numbers; there must be two for each of the ", size, " ids"));
  }
  v1::SparseIds* const sparse = message->mutable_sparse();
  EncodeInts(ids.indices, {size, 2}, sparse->mutable_indices(), writer);
  EncodeInts(ids.values, {size}, sparse->mutable_values(), writer);
  sparse->set_sample_count(ids.samples);
  return absl::OkStatus();
}

absl::Status EncodeIds(const RaggedIds& ids, const FeatureInfo&, v1::FeatureIds* message,
                       BlockWriter* writer) {
  v1::RaggedIds* const ragged = message->mutable_ragged();
  EncodeInts(ids.row_splits, {Size(ids.row_splits)}, ragged->mutable_row_splits(), writer);
  EncodeInts(ids.values, {Size(ids.values)}, ragged->mutable_values(), writer);
  return absl::OkStatus();
}

// Weights of dense ids have the shape of the ids, others are a vector.
void EncodeWeights(absl::Span<const float> weights, v1::FeatureIds* message, BlockWriter* writer) {
  if (weights.empty()) return;
  const int64_t size = static_cast<int64_t>(weights.size());
  absl::Span<const int64_t> shape = absl::MakeConstSpan(&size, 1);
  const absl::Span<const int64_t> ids = message->dense().ids().shape();
  if (message->has_dense() && size == Elements(ids)) shape = ids;
  v1::Tensor* const tensor = message->has_sparse()   ? message->mutable_sparse()->mutable_weights()
                             : message->has_ragged() ? message->mutable_ragged()->mutable_weights()
                                                     : message->mutable_dense()->mutable_weights();
  EncodeFloats(weights, shape, WireType::kFloat32, tensor, writer);
}

// Trainers mostly keep the order of the model, so `hint`, the place in the request, is tried first.
absl::StatusOr<const FeatureInfo*> FindFeature(const Model& model, const std::string& name,
                                               size_t hint) {
  if (hint < model.features.size() && model.features[hint].name == name) {
    return &model.features[hint];
  }
  if (const FeatureInfo* info = model.FindFeature(name); info != nullptr) return info;
  return Bad(name, absl::StrCat("the model \"", model.name, "\" has no such feature"));
}

// `writer`: where ids and weights go; null: into the message.
absl::Status EncodeFeature(const FeatureIds& feature, const FeatureInfo& info,
                           v1::FeatureIds* message, BlockWriter* writer = nullptr) {
  message->set_feature(info.name);
  const auto encode = [&](const auto& ids) { return EncodeIds(ids, info, message, writer); };
  RETURN_IF_ERROR(std::visit(encode, feature.ids));
  EncodeWeights(feature.weights, message, writer);
  return absl::OkStatus();
}

absl::Status CheckGradient(const FeatureGradient& gradient, const FeatureInfo& info) {
  const int64_t size = static_cast<int64_t>(gradient.values.size());
  const int64_t dim = info.embedding_dim;
  const int64_t stride = gradient.row_stride == 0 ? dim : gradient.row_stride;
  if (stride < dim) {
    return Bad(info.name, absl::StrCat("gradient: row_stride: ", stride,
                                       " is not allowed; it must be 0 or at least ", dim));
  }
  // So that nothing overflows: the last row ends where the floats end.
  const bool fits = gradient.samples == 0 ? size == 0
                                          : size >= dim && (size - dim) % stride == 0 &&
                                                (size - dim) / stride + 1 == gradient.samples;
  if (fits) return absl::OkStatus();
  return Bad(info.name, absl::StrCat("gradient: ", size, " floats do not fill the shape [",
                                     gradient.samples, ", ", info.embedding_dim, "]"));
}

// The embedding_dim of each.
absl::StatusOr<std::vector<int64_t>> CheckGradients(const Model& model,
                                                    absl::Span<const FeatureGradient> gradients) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < gradients.size(); ++i) {
    ASSIGN_OR_RETURN(const FeatureInfo* const info,
                     FindFeature(model, std::string(gradients[i].feature), i));
    RETURN_IF_ERROR(CheckGradient(gradients[i], *info));
    dims.push_back(info->embedding_dim);
  }
  return dims;
}

void EncodeHyperparameters(const StepHyperparameters& parameters,
                           v1::StepHyperparameters* message) {
  message->set_table(parameters.table);
  for (const auto& [name, value] : parameters.values) (*message->mutable_values())[name] = value;
}

BatchStatistics DecodeStatistics(const v1::BatchStatistics& message) {
  BatchStatistics statistics;
  statistics.num_minibatches = message.num_minibatches();
  for (const v1::StackStatistics& stack : message.stacks()) {
    statistics.stacks.push_back(
        {.stack = stack.stack(),
         .ids = stack.ids(),
         .unique_ids = stack.unique_ids(),
         .duplicate_ids = stack.duplicate_ids(),
         .max_ids_per_partition = stack.max_ids_per_partition(),
         .max_unique_ids_per_partition = stack.max_unique_ids_per_partition(),
         .required_buffer_size = stack.required_buffer_size(),
         .dropped_ids = stack.dropped_ids(),
         .pad_cells = stack.pad_cells(),
         .bytes_gathered = stack.bytes_gathered(),
         .activation_bytes_per_sparsecore = stack.activation_bytes_per_sparsecore(),
         .imbalance = stack.imbalance(),
         .limit_ids_per_partition = stack.limit_ids_per_partition(),
         .limit_unique_ids_per_partition = stack.limit_unique_ids_per_partition()});
  }
  return statistics;
}

// Samples of what is given to the client, before it has been checked.
int64_t SampleCount(const FeatureIds& feature, const FeatureInfo& info) {
  if (const auto* dense = std::get_if<DenseIds>(&feature.ids)) {
    if (!dense->shape.empty()) return ReadShape(dense->shape, info).samples;
    return Size(dense->ids) / std::max<int64_t>(1, dense->ids_per_sample);
  }
  if (const auto* sparse = std::get_if<SparseIds>(&feature.ids)) return sparse->samples;
  return Size(std::get<RaggedIds>(feature.ids).row_splits) - 1;
}

}  // namespace

std::shared_ptr<float> TakeFloats(BufferPool* pool, size_t size) {
  auto block = std::make_shared<PooledArray<float>>(*pool, size);
  float* const floats = block->data();
  return {std::move(block), floats};
}

void SetHead(v1::DataType dtype, absl::Span<const int64_t> shape, v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
}

int64_t ElementBytes(WireType type) { return type == WireType::kBfloat16 ? 2 : 4; }

int64_t Size(const IntSpan& ints) {
  return std::visit([](auto span) { return static_cast<int64_t>(span.size()); }, ints);
}

void EncodeInts(const IntSpan& ints, absl::Span<const int64_t> shape, v1::Tensor* tensor,
                BlockWriter* writer) {
  const bool wide = std::holds_alternative<absl::Span<const int64_t>>(ints);
  SetHead(wide ? v1::INT64 : v1::INT32, shape, tensor);
  std::visit([&](auto span) { SetData(span, tensor, writer); }, ints);
}

void EncodeFloats(absl::Span<const float> floats, absl::Span<const int64_t> shape, WireType type,
                  v1::Tensor* tensor, BlockWriter* writer) {
  SetHead(WireDataType(type), shape, tensor);
  if (type == WireType::kFloat32) {
    SetData(floats, tensor, writer);
    return;
  }
  std::string* data = tensor->mutable_data();
  data->resize(floats.size() * 2);
  ToBfloat16Bytes(floats, data->data());
}

v1::DataType WireDataType(WireType type) {
  return type == WireType::kBfloat16 ? v1::BFLOAT16 : v1::FLOAT32;
}

absl::StatusOr<absl::Span<const float>> DecodeFloats(const v1::Tensor& tensor, int64_t rows,
                                                     int64_t dim) {
  RETURN_IF_ERROR(CheckTensor(tensor, rows, dim, WireType::kFloat32));
  // A string's bytes lie at a multiple of 8 at least, so they can be read as floats in place.
  return absl::MakeConstSpan(reinterpret_cast<const float*>(tensor.data().data()), rows * dim);
}

absl::Status CheckSize(const google::protobuf::Message& message) {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max();
  const size_t size = message.ByteSizeLong();
  if (size <= kMost) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the request has ", size, " bytes; a message can have at most ", kMost));
}

absl::StatusOr<v1::LookupRequest> EncodeLookup(const Model& model,
                                               absl::Span<const FeatureIds> features,
                                               bool inference, WireType activations) {
  v1::LookupRequest request;
  request.set_model_id(model.id);
  request.set_inference(inference);
  request.set_activation_dtype(WireDataType(activations));
  request.mutable_features()->Reserve(static_cast<int>(features.size()));
  for (size_t i = 0; i < features.size(); ++i) {
    ASSIGN_OR_RETURN(const FeatureInfo* const info,
                     FindFeature(model, std::string(features[i].feature), i));
    RETURN_IF_ERROR(EncodeFeature(features[i], *info, request.add_features()));
  }
  RETURN_IF_ERROR(CheckSize(request));
  return request;
}

absl::StatusOr<ExpectedLookup> ExpectLookup(const Model& model,
                                            absl::Span<const FeatureIds> features, WireType type,
                                            bool concat) {
  ExpectedLookup expected;
  expected.type = type;
  for (size_t i = 0; i < features.size(); ++i) {
    const std::string name(features[i].feature);
    ASSIGN_OR_RETURN(const FeatureInfo* const info, FindFeature(model, name, i));
    const int64_t samples = std::max<int64_t>(0, SampleCount(features[i], *info));
    expected.features.push_back({.name = name, .samples = samples, .dim = info->embedding_dim});
  }
  RETURN_IF_ERROR(PlaceActivations(concat, &expected));
  return expected;
}

absl::StatusOr<LookupResult> DecodeLookup(ExpectedLookup expected, bool inference,
                                          const v1::LookupResponse& response, BufferPool* pool) {
  if (response.batch_handle() == 0 && !inference) {
    return absl::InternalError("batch_handle: the server sent 0");
  }
  LookupAssembler assembler(std::move(expected), pool);
  for (const v1::FeatureActivation& activation : response.activations()) {
    RETURN_IF_ERROR(assembler.AddActivation(activation));
  }
  RETURN_IF_ERROR(assembler.Finish(response.shared_bytes()));
  TrainLookupResult answer = assembler.Take();
  LookupResult result;
  result.batch.value = response.batch_handle();
  result.activations = std::move(answer.activations);
  result.statistics = DecodeStatistics(response.statistics());
  result.memory = std::move(answer.memory);
  return result;
}

absl::StatusOr<v1::ApplyGradientsRequest> EncodeApply(const Model& model, const BatchHandle& batch,
                                                      absl::Span<const FeatureGradient> gradients,
                                                      const ApplyOptions& options, WireType type,
                                                      SharedGradients* shared) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> dims, CheckGradients(model, gradients));
  if (shared != nullptr) shared->Reserve(gradients, dims, type, SteadyNow() + kSendPatience);
  v1::ApplyGradientsRequest request;
  request.set_model_id(model.id);
  request.set_batch_handle(batch.value);
  if (options.step >= 0) request.set_step(options.step);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const FeatureGradient& gradient = gradients[i];
    const int64_t dim = dims[i];
    v1::FeatureGradient* added = request.add_gradients();
    added->set_feature(std::string(gradient.feature));
    if (shared != nullptr && shared->Put(gradient, dim, type, added)) continue;
    v1::Tensor* const tensor = added->mutable_gradient();
    SetHead(WireDataType(type), {gradient.samples, dim}, tensor);
    tensor->mutable_data()->resize(gradient.samples * dim * ElementBytes(type));
    CopyGradient(gradient, dim, type, tensor->mutable_data()->data());
  }
  for (const StepHyperparameters& parameters : options.hyperparameters) {
    EncodeHyperparameters(parameters, request.add_hyperparameters());
  }
  RETURN_IF_ERROR(CheckSize(request));
  return request;
}

const Activation* LookupResult::Find(std::string_view feature) const {
  for (const Activation& activation : activations) {
    if (activation.feature == feature) return &activation;
  }
  return nullptr;
}

void ExpectedLookup::Lend() {
  if (ids != nullptr) ids->Lend();
  if (activations != nullptr) activations->Lend();
}

void ExpectedLookup::Settle() {
  if (ids != nullptr) ids->Settle();
  if (activations != nullptr) activations->Settle();
  ids = nullptr;
}

absl::Status PlaceActivations(bool concat, ExpectedLookup* expected) {
  expected->concat = concat;
  size_t end = 0;
  for (ExpectedLookup::Feature& feature : expected->features) {
    feature.offset = end;
    feature.row_stride = feature.dim;
    end += concat
               ? feature.dim
               : AlignTensor(static_cast<size_t>(feature.samples) * feature.dim * sizeof(float)) /
                     sizeof(float);
  }
  expected->floats = end;
  if (!concat || expected->features.empty()) return absl::OkStatus();
  const ExpectedLookup::Feature& first = expected->features.front();
  for (ExpectedLookup::Feature& feature : expected->features) {
    feature.row_stride = static_cast<int64_t>(end);
    if (feature.samples == first.samples) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "concat: feature \"", first.name, "\" has ", first.samples, " samples, and feature \"",
        feature.name, "\" has ", feature.samples, "; they must have the same number"));
  }
  expected->floats = end * first.samples;
  return absl::OkStatus();
}

size_t SharedBytes(const ExpectedLookup& expected) {
  // Sparse ids may come with any number of samples. What no answer can hold is not shared either.
  constexpr double kMostElements = int64_t{1} << 31;
  double elements = 0;
  for (const ExpectedLookup::Feature& feature : expected.features) {
    elements += static_cast<double>(feature.samples) * static_cast<double>(feature.dim);
  }
  if (elements > kMostElements) return 0;
  const size_t element = ElementBytes(expected.type);
  if (expected.concat) return expected.floats * element;
  size_t bytes = 0;
  for (const ExpectedLookup::Feature& feature : expected.features) {
    bytes += AlignTensor(feature.samples * feature.dim * element);
  }
  return bytes;
}

LookupAssembler::LookupAssembler(ExpectedLookup expected, BufferPool* pool)
    : expected_(std::move(expected)), pool_(pool) {
  result_.step = expected_.step;
}

absl::StatusOr<bool> LookupAssembler::Add(const v1::TrainLookupResult& part) {
  if (part.step() != expected_.step) {
    return absl::InternalError(
        absl::StrCat("step: the server sent ", part.step(), "; ", expected_.step, " was expected"));
  }
  for (const v1::FeatureActivation& activation : part.activations()) {
    RETURN_IF_ERROR(AddActivation(activation));
  }
  if (part.continues()) return false;
  result_.statistics = DecodeStatistics(part.statistics());
  result_.times = DecodeTimes(part.times());
  RETURN_IF_ERROR(Finish(part.shared_bytes()));
  return true;
}

absl::Status LookupAssembler::Finish(uint64_t shared_bytes) {
  expected_.Settle();
  if (shared_bytes > 0) {
    if (next_ > 0) return absl::InternalError("the server sent activations and shared_bytes");
    ASSIGN_OR_RETURN(memory_, ReadShared(expected_, shared_bytes, pool_, &result_.activations));
    next_ = expected_.features.size();
  }
  if (next_ < expected_.features.size()) {
    return absl::InternalError(absl::StrCat("activations: the server sent ", next_, "; ",
                                            expected_.features.size(), " were expected"));
  }
  if (memory_ == nullptr) memory_ = TakeFloats(pool_, expected_.floats);  // there are none
  return absl::OkStatus();
}

absl::Status LookupAssembler::AddActivation(const v1::FeatureActivation& activation) {
  if (memory_ == nullptr) memory_ = TakeFloats(pool_, expected_.floats);
  if (next_ == expected_.features.size()) {
    return absl::InternalError(
        absl::StrCat("activations: the server sent more than ", next_, ", which were expected"));
  }
  const ExpectedLookup::Feature& feature = expected_.features[next_];
  const v1::Tensor& tensor = activation.activation();
  const absl::Status status =
      activation.feature() == feature.name
          ? CheckTensor(tensor, feature.samples, feature.dim, expected_.type)
          : absl::InternalError(
                absl::StrCat("feature: the server sent \"", activation.feature(), "\""));
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat("activations[", next_, "] (feature \"", feature.name,
                                            "\").", status.message()));
  }
  CopyElements(tensor, expected_.type, feature, memory_.get() + feature.offset);
  result_.activations.push_back(ActivationIn(feature, memory_.get()));
  ++next_;
  return absl::OkStatus();
}

TrainLookupResult LookupAssembler::Take() {
  if (expected_.concat) result_.concat = absl::MakeConstSpan(memory_.get(), expected_.floats);
  result_.memory = std::move(memory_);
  return std::move(result_);
}

StepTimes DecodeTimes(const v1::StepTimes& message) {
  return {.preprocess = absl::Microseconds(message.preprocess_us()),
          .wait_for_ranks = absl::Microseconds(message.wait_for_ranks_us()),
          .wait_for_update = absl::Microseconds(message.wait_for_update_us()),
          .shards = absl::Microseconds(message.shards_us()),
          .combine = absl::Microseconds(message.combine_us()),
          .slowest_rank = message.slowest_rank()};
}

// ---- The requests of a Train stream

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
    const int64_t dim = dims[i];
    constexpr int kField = v1::TrainUpdate::kGradientsFieldNumber;
    v1::FeatureGradient sent;
    sent.set_feature(std::string(gradient.feature));
    if (shared != nullptr && shared->Put(gradient, dim, type, &sent)) {
      encoder.gradients_.push_back(
          {.head = rpc::BeginFields({{kField, sent.SerializeAsString()}}, 0)});
      continue;
    }
    const size_t size = gradient.samples * dim * ElementBytes(type);
    RETURN_IF_ERROR(CheckTensorBytes(sent.feature(), size));
    v1::Tensor tensor;  // but for its bytes, with which it ends
    SetHead(WireDataType(type), {gradient.samples, dim}, &tensor);
    const std::string head =
        rpc::BeginFields({{kField, sent.SerializeAsString()},
                          {v1::FeatureGradient::kGradientFieldNumber, tensor.SerializeAsString()},
                          {v1::Tensor::kDataFieldNumber, ""}},
                         size);
    encoder.gradients_.push_back({&gradient, dim, size, head});
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
