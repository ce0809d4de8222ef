#include "server/coordinator/lookup_request.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/coordinator/tensor_view.h"

namespace emberd::server {
namespace {

using preprocess::DenseInput;
using preprocess::FeatureInput;
using preprocess::RaggedInput;
using preprocess::SparseInput;

absl::Status DecodeDense(const v1::DenseIds& dense, const std::string& path, FeatureInput* input) {
  const v1::Tensor& ids = dense.ids();
  if (ids.shape_size() != 1 && ids.shape_size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".ids.shape is ", ShapeText(ids.shape()),
                     "; it must be [samples] or [samples, ids_per_sample]"));
  }
  auto span = IntsOf(ids, path + ".ids");
  if (!span.ok()) return span.status();
  input->ids = DenseInput{*span, ids.shape_size() == 2 ? ids.shape(1) : 1, ids.shape(0)};
  return absl::OkStatus();
}

absl::Status DecodeSparse(const v1::SparseIds& sparse, const std::string& path,
                          FeatureInput* input) {
  auto indices = IntsOf(sparse.indices(), path + ".indices");
  if (!indices.ok()) return indices.status();
  auto values = IntsOf(sparse.values(), path + ".values");
  if (!values.ok()) return values.status();
  if (absl::Status status = CheckRank(sparse.values(), 1, path + ".values"); !status.ok())
    return status;
  const int64_t n = sparse.values().shape(0);
  if (absl::Status status = CheckShape(sparse.indices(), {n, 2}, path + ".indices"); !status.ok())
    return status;
  if (sparse.sample_count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".sample_count is ", sparse.sample_count(), "; it must be >= 0"));
  }
  input->ids = SparseInput{*indices, *values, sparse.sample_count()};
  return absl::OkStatus();
}

absl::Status DecodeRagged(const v1::RaggedIds& ragged, const std::string& path,
                          FeatureInput* input) {
  auto row_splits = IntsOf(ragged.row_splits(), path + ".row_splits");
  if (!row_splits.ok()) return row_splits.status();
  if (absl::Status status = CheckRank(ragged.row_splits(), 1, path + ".row_splits"); !status.ok())
    return status;
  auto values = IntsOf(ragged.values(), path + ".values");
  if (!values.ok()) return values.status();
  if (absl::Status status = CheckRank(ragged.values(), 1, path + ".values"); !status.ok())
    return status;
  if (ragged.row_splits().shape(0) < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".row_splits is empty; it must have samples + 1 entries"));
  }
  input->ids = RaggedInput{*row_splits, *values};
  return absl::OkStatus();
}

// `ids` is the tensor that the weights go with.
absl::Status DecodeWeights(const v1::Tensor& weights, const v1::Tensor& ids,
                           const std::string& path, FeatureInput* input) {
  auto span = FloatsOf(weights, path + ".weights");
  if (!span.ok()) return span.status();
  const bool broadcast = weights.shape_size() <= 1 && span->size() == 1;
  if (!broadcast) {
    absl::Status status = CheckShape(weights, ids.shape(), path + ".weights");
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(status.message(), ", or [1] for one weight for all"));
    }
  }
  input->has_weights = true;
  input->weights = *span;
  return absl::OkStatus();
}

absl::Status DecodeFeature(const v1::FeatureIds& feature, const std::string& path,
                           FeatureInput* input) {
  absl::Status status;
  switch (feature.ids_case()) {
    case v1::FeatureIds::kDense:
      status = DecodeDense(feature.dense(), path + ".dense", input);
      if (!status.ok() || !feature.dense().has_weights()) return status;
      return DecodeWeights(feature.dense().weights(), feature.dense().ids(), path + ".dense",
                           input);
    case v1::FeatureIds::kSparse:
      status = DecodeSparse(feature.sparse(), path + ".sparse", input);
      if (!status.ok() || !feature.sparse().has_weights()) return status;
      return DecodeWeights(feature.sparse().weights(), feature.sparse().values(), path + ".sparse",
                           input);
    case v1::FeatureIds::kRagged:
      status = DecodeRagged(feature.ragged(), path + ".ragged", input);
      if (!status.ok() || !feature.ragged().has_weights()) return status;
      return DecodeWeights(feature.ragged().weights(), feature.ragged().values(), path + ".ragged",
                           input);
    case v1::FeatureIds::IDS_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ".ids is not set; it must be dense, sparse or ragged"));
}

int64_t SampleCount(const FeatureInput& input) {
  if (const auto* dense = std::get_if<DenseInput>(&input.ids)) return dense->sample_count;
  if (const auto* sparse = std::get_if<SparseInput>(&input.ids)) return sparse->sample_count;
  return IntCount(std::get<RaggedInput>(input.ids).row_splits) - 1;
}

absl::Status CheckActivationBytes(const LookupInput& input, const ServedModel& model,
                                  int64_t limit) {
  const int64_t element = ElementSize(input.activation_dtype);
  int64_t left = limit;
  for (size_t i = 0; i < input.features.size(); ++i) {
    const int64_t samples = SampleCount(input.features[i]);
    const int64_t row = element * model.TableOfFeature(static_cast<int>(i)).embedding_dim();
    if (samples > left / row) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "feature '", model.config.features(static_cast<int>(i)).name(), "': ", samples,
          " samples of ", row,
          " bytes make the activations larger than budgets.max_message_bytes = ", limit));
    }
    left -= samples * row;
  }
  return absl::OkStatus();
}

}  // namespace

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
      return absl::InvalidArgumentError(absl::StrCat(
          "activation_dtype is ", request.activation_dtype(), "; it must be FLOAT32 or BFLOAT16"));
  }
  input.features.resize(model.config.features_size());
  std::vector<bool> given(model.config.features_size());
  for (int i = 0; i < request.features_size(); ++i) {
    const v1::FeatureIds& feature = request.features(i);
    const auto found = model.features.find(feature.feature());
    if (found == model.features.end()) {
      return absl::InvalidArgumentError(absl::StrCat("features[", i, "].feature is '",
                                                     feature.feature(), "', which model '",
                                                     model.config.name(), "' does not have"));
    }
    if (given[found->second]) {
      return absl::InvalidArgumentError(
          absl::StrCat("features[", i, "].feature '", feature.feature(), "' is repeated"));
    }
    given[found->second] = true;
    input.order.push_back(found->second);
    absl::Status status = DecodeFeature(feature, absl::StrCat("feature '", feature.feature(), "'"),
                                        &input.features[found->second]);
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("features: '", model.config.features(static_cast<int>(i)).name(),
                       "' is missing; every feature must be given once"));
    }
  }
  absl::Status status = CheckActivationBytes(input, model, max_activation_bytes);
  if (!status.ok()) return status;
  return input;
}

}  // namespace emberd::server
