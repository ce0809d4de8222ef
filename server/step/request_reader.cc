#include "server/step/request_reader.h"

#include <limits>
#include <utility>

#include <google/protobuf/message.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/buffers.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"

namespace emberd::step {
namespace {

absl::Status Invalid(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, what));
}

// Protobuf allocates strings aligned for any type; a view of odd memory would be undefined
// behaviour, so it is refused rather than assumed away.
template <typename T>
absl::StatusOr<absl::Span<const T>> View(const v1::Tensor& tensor, int64_t size,
                                         const std::string& path) {
  const char* data = tensor.data().data();
  if (reinterpret_cast<uintptr_t>(data) % alignof(T) != 0) {
    return absl::InternalError(absl::StrCat(path, ".data is not aligned in memory"));
  }
  return absl::Span<const T>(reinterpret_cast<const T*>(data), size);
}

// Elements that the shape has; the greatest number if they cannot be counted.
absl::StatusOr<int64_t> ElementsOf(const v1::Tensor& tensor, const std::string& path) {
  if (ElementSize(tensor.dtype()) == 0) {
    return Invalid(path, absl::StrCat(".dtype is ", TypeText(tensor.dtype()),
                                      "; it must be set to a known type"));
  }
  int64_t size = 1;
  bool counted = true;
  for (int i = 0; i < tensor.shape_size(); ++i) {
    const int64_t extent = tensor.shape(i);
    if (extent < 0) {
      return Invalid(path, absl::StrCat(".shape[", i, "] is ", extent, "; it must be >= 0"));
    }
    counted = counted && !__builtin_mul_overflow(size, extent, &size);
  }
  return counted ? size : std::numeric_limits<int64_t>::max();
}

using preprocess::DenseInput;
using preprocess::FeatureInput;
using preprocess::RaggedInput;
using preprocess::SparseInput;

// `ids` is the tensor that the weights, if `from` has any, go with.
template <typename Ids>
absl::Status DecodeWeights(const Ids& from, const v1::Tensor& ids, const std::string& path,
                           FeatureInput* input) {
  if (!from.has_weights()) return absl::OkStatus();
  const v1::Tensor& weights = from.weights();
  ASSIGN_OR_RETURN(auto span, FloatsOf(weights, path + ".weights"));
  const bool broadcast = weights.shape_size() <= 1 && span.size() == 1;
  if (!broadcast) {
    absl::Status status = CheckShape(weights, ids.shape(), path + ".weights");
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(status.message(), ", or [1] for one weight for all"));
    }
  }
  input->has_weights = true;
  input->weights = span;
  return absl::OkStatus();
}

absl::Status DecodeDense(const v1::DenseIds& dense, const v1::FeatureConfig& config,
                         const std::string& path, FeatureInput* input) {
  ASSIGN_OR_RETURN(auto span, IntsOf(dense.ids(), path + ".ids"));
  const auto read = config::SamplesOf(dense.ids().shape(), config.output_shape());
  if (!read.ok()) return Invalid(path, absl::StrCat(".ids.", read.status().message()));
  input->ids = DenseInput{span, read->ids_per_sample, read->samples};
  return DecodeWeights(dense, dense.ids(), path, input);
}

absl::Status DecodeSparse(const v1::SparseIds& sparse, const std::string& path,
                          FeatureInput* input) {
  ASSIGN_OR_RETURN(auto indices, IntsOf(sparse.indices(), path + ".indices"));
  ASSIGN_OR_RETURN(auto values, IntsOf(sparse.values(), path + ".values"));
  RETURN_IF_ERROR(CheckRank(sparse.values(), 1, path + ".values"));
  const int64_t n = sparse.values().shape(0);
  RETURN_IF_ERROR(CheckShape(sparse.indices(), {n, 2}, path + ".indices"));
  if (sparse.sample_count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".sample_count is ", sparse.sample_count(), "; it must be >= 0"));
  }
  input->ids = SparseInput{indices, values, sparse.sample_count()};
  return DecodeWeights(sparse, sparse.values(), path, input);
}

absl::Status DecodeRagged(const v1::RaggedIds& ragged, const std::string& path,
                          FeatureInput* input) {
  ASSIGN_OR_RETURN(auto row_splits, IntsOf(ragged.row_splits(), path + ".row_splits"));
  RETURN_IF_ERROR(CheckRank(ragged.row_splits(), 1, path + ".row_splits"));
  ASSIGN_OR_RETURN(auto values, IntsOf(ragged.values(), path + ".values"));
  RETURN_IF_ERROR(CheckRank(ragged.values(), 1, path + ".values"));
  if (ragged.row_splits().shape(0) < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".row_splits is empty; it must have samples + 1 entries"));
  }
  input->ids = RaggedInput{row_splits, values};
  return DecodeWeights(ragged, ragged.values(), path, input);
}

absl::Status DecodeFeature(const v1::FeatureIds& feature, const v1::FeatureConfig& config,
                           const std::string& path, FeatureInput* input) {
  switch (feature.ids_case()) {
    case v1::FeatureIds::kDense:
      return DecodeDense(feature.dense(), config, path + ".dense", input);
    case v1::FeatureIds::kSparse:
      return DecodeSparse(feature.sparse(), path + ".sparse", input);
    case v1::FeatureIds::kRagged:
      return DecodeRagged(feature.ragged(), path + ".ragged", input);
    case v1::FeatureIds::IDS_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ".ids is not set; it must be dense, sparse or ragged"));
}

absl::Status CountActivationBytes(const ServedModel& model, int64_t limit, LookupInput* counted) {
  const LookupInput& input = *counted;
  const int64_t element = ElementSize(input.activation_dtype);
  int64_t left = limit;
  for (size_t i = 0; i < input.features.size(); ++i) {
    const int64_t samples = preprocess::SampleCount(input.features[i]);
    const int64_t row = element * model.TableOfFeature(static_cast<int>(i)).embedding_dim();
    if (samples > left / row) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "feature '", model.config.features(static_cast<int>(i)).name(), "': ", samples,
          " samples of ", row,
          " bytes make the activations larger than budgets.max_message_bytes = ", limit));
    }
    left -= samples * row;
  }
  counted->activation_bytes = limit - left;
  return absl::OkStatus();
}

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

absl::Status CheckSameStep(int64_t step, int64_t of_message) {
  if (step == of_message) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("step is ", of_message, " in a message of the request of step ", step));
}

absl::Status TooEarly(absl::string_view what, int64_t step, absl::string_view open,
                      int64_t open_step) {
  return absl::InvalidArgumentError(absl::StrCat(what, " of step ", step, " begins before the ",
                                                 open, " of step ", open_step, " is complete"));
}

}  // namespace

int64_t ElementSize(v1::DataType dtype) {
  switch (dtype) {
    case v1::BFLOAT16:
      return 2;
    case v1::FLOAT32:
    case v1::INT32:
      return 4;
    case v1::INT64:
      return 8;
    default:
      return 0;
  }
}

std::string TypeText(v1::DataType dtype) {
  return v1::DataType_IsValid(dtype) ? v1::DataType_Name(dtype)
                                     : absl::StrCat(static_cast<int>(dtype));
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> ShapeBytes(const v1::Tensor& tensor, const std::string& path) {
  ASSIGN_OR_RETURN(const int64_t size, ElementsOf(tensor, path));
  int64_t bytes = 0;
  if (!__builtin_mul_overflow(size, ElementSize(tensor.dtype()), &bytes)) return bytes;
  return Invalid(path, absl::StrCat(".shape ", ShapeText(tensor.shape()), " of ",
                                    TypeText(tensor.dtype()), " needs more than ", size, " bytes"));
}

absl::StatusOr<int64_t> CheckedSize(const v1::Tensor& tensor, const std::string& path) {
  const auto data_bytes = static_cast<int64_t>(tensor.data().size());
  ASSIGN_OR_RETURN(const int64_t size, ElementsOf(tensor, path));
  const int64_t element = ElementSize(tensor.dtype());
  int64_t bytes = 0;
  const bool overflows = __builtin_mul_overflow(size, element, &bytes);
  if (overflows || bytes != data_bytes) {
    return Invalid(
        path, absl::StrCat(".data has ", data_bytes, " bytes; shape ", ShapeText(tensor.shape()),
                           " of ", TypeText(tensor.dtype()), " needs ",
                           overflows ? absl::StrCat("more than ", size) : absl::StrCat(bytes)));
  }
  return size;
}

absl::StatusOr<preprocess::IntSpan> IntsOf(const v1::Tensor& tensor, const std::string& path) {
  if (tensor.dtype() != v1::INT32 && tensor.dtype() != v1::INT64) {
    return Invalid(
        path, absl::StrCat(".dtype is ", TypeText(tensor.dtype()), "; it must be INT32 or INT64"));
  }
  ASSIGN_OR_RETURN(int64_t size, CheckedSize(tensor, path));
  if (tensor.dtype() == v1::INT32) {
    ASSIGN_OR_RETURN(auto view, View<int32_t>(tensor, size, path));
    return preprocess::IntSpan(view);
  }
  ASSIGN_OR_RETURN(auto view, View<int64_t>(tensor, size, path));
  return preprocess::IntSpan(view);
}

absl::StatusOr<absl::Span<const float>> FloatsOf(const v1::Tensor& tensor,
                                                 const std::string& path) {
  if (tensor.dtype() != v1::FLOAT32) {
    return Invalid(path,
                   absl::StrCat(".dtype is ", TypeText(tensor.dtype()), "; it must be FLOAT32"));
  }
  ASSIGN_OR_RETURN(int64_t size, CheckedSize(tensor, path));
  return View<float>(tensor, size, path);
}

absl::Status CheckShape(const v1::Tensor& tensor, absl::Span<const int64_t> expected,
                        const std::string& path) {
  if (absl::MakeConstSpan(tensor.shape()) == expected) return absl::OkStatus();
  return Invalid(path, absl::StrCat(".shape is ", ShapeText(tensor.shape()), "; it must be ",
                                    ShapeText(expected)));
}

absl::Status CheckRank(const v1::Tensor& tensor, int rank, const std::string& path) {
  if (tensor.shape_size() == rank) return absl::OkStatus();
  return Invalid(path, absl::StrCat(".shape is ", ShapeText(tensor.shape()), "; it must have ",
                                    rank, " dimension", rank == 1 ? "" : "s"));
}

absl::StatusOr<int> FindFeature(const ServedModel& model, const std::string& name,
                                absl::string_view list, int64_t i) {
  const auto found = model.features.find(name);
  if (found != model.features.end()) return found->second;
  return absl::InvalidArgumentError(absl::StrCat(
      list, "[", i, "].feature is '", name, "', which model '", model.config.name(),
      "' does not have; ", KnownNames("features", name, config::FeatureNames(model.config))));
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

absl::Status CopySharedIds(const RegionServer* regions, v1::LookupRequest* request) {
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

absl::StatusOr<LookupInput> DecodeLookup(const v1::LookupRequest& request, const ServedModel& model,
                                         int64_t max_activation_bytes) {
  LookupInput input;
  switch (request.activation_dtype()) {
    case v1::DATA_TYPE_UNSPECIFIED:
    case v1::FLOAT32:
      break;
    case v1::BFLOAT16:
      input.activation_dtype = v1::BFLOAT16;
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("activation_dtype is ",
                                                     TypeText(request.activation_dtype()),
                                                     "; it must be FLOAT32 or BFLOAT16"));
  }
  input.features.resize(model.config.features_size());
  std::vector<bool> given(model.config.features_size());
  for (int i = 0; i < request.features_size(); ++i) {
    const v1::FeatureIds& feature = request.features(i);
    ASSIGN_OR_RETURN(const int index, FindFeature(model, feature.feature(), "features", i));
    if (given[index]) {
      return absl::InvalidArgumentError(
          absl::StrCat("features[", i, "].feature '", feature.feature(), "' is repeated"));
    }
    given[index] = true;
    input.order.push_back(index);
    const v1::FeatureConfig& config = model.config.features(index);
    FeatureInput* const read = &input.features[index];
    RETURN_IF_ERROR(
        DecodeFeature(feature, config, absl::StrCat("feature '", feature.feature(), "'"), read));
    RETURN_IF_ERROR(config::CheckSamples(config, preprocess::SampleCount(*read)));
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("features: '", model.config.features(static_cast<int>(i)).name(),
                       "' is missing; every feature must be given once"));
    }
  }
  RETURN_IF_ERROR(CountActivationBytes(model, max_activation_bytes, &input));
  return input;
}

// ---- The messages of a training stream

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::Add(v1::TrainRequest* message,
                                                                    int64_t bytes) {
  switch (message->request_case()) {
    case v1::TrainRequest::kLookup:
      return AddLookup(message->mutable_lookup(), bytes);
    case v1::TrainRequest::kUpdate:
      return AddUpdate(message->mutable_update(), bytes);
    case v1::TrainRequest::kStart:
      return absl::InvalidArgumentError("start: it was sent already, as the first message");
    case v1::TrainRequest::REQUEST_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("request: neither lookup nor update is set");
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddLookup(v1::TrainLookup* message,
                                                                          int64_t bytes) {
  if (update_.has_value()) return TooEarly("lookup", message->step(), "update", update_->step);
  if (!lookup_.has_value()) {
    lookup_.emplace().step = message->step();
    lookup_->lookup.emplace().set_activation_dtype(message->activation_dtype());
    if (message->has_shared()) lookup_->lookup->mutable_shared()->Swap(message->mutable_shared());
  }
  RETURN_IF_ERROR(CheckSameStep(lookup_->step, message->step()));
  lookup_->bytes += bytes;
  for (v1::FeatureIds& ids : *message->mutable_features()) {
    *lookup_->lookup->add_features() = std::move(ids);
  }
  if (message->continues()) return std::nullopt;
  return std::exchange(lookup_, std::nullopt);
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddUpdate(v1::TrainUpdate* update,
                                                                          int64_t bytes) {
  if (lookup_.has_value()) return TooEarly("update", update->step(), "lookup", lookup_->step);
  if (!update_.has_value()) {
    update_.emplace().step = update->step();
    update_->update.emplace().gradients.set_step(update->step());
  }
  RETURN_IF_ERROR(CheckSameStep(update_->step, update->step()));
  update_->bytes += bytes;
  TrainUpdateRequest& whole = *update_->update;
  for (v1::FeatureGradient& gradient : *update->mutable_gradients()) {
    *whole.gradients.add_gradients() = std::move(gradient);
  }
  for (v1::StepHyperparameters& of_table : *update->mutable_hyperparameters()) {
    *whole.gradients.add_hyperparameters() = std::move(of_table);
  }
  whole.skip |= update->skip();
  if (whole.skip && whole.gradients.gradients_size() > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "update.skip is true in step ", update_->step, ", but gradients of feature \"",
        whole.gradients.gradients(0).feature(), "\" came with it; a skipped step has none"));
  }
  if (!update->checkpoint().empty()) whole.checkpoint = update->checkpoint();
  if (update->continues()) return std::nullopt;
  return std::exchange(update_, std::nullopt);
}

}  // namespace emberd::step
