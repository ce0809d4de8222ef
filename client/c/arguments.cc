#include "client/c/arguments.h"

#include <limits>
#include <optional>

#include "absl/time/time.h"
#include "base/status.h"

namespace emberd::c {
namespace {

absl::StatusOr<client::WireType> ReadWireType(const char* what, int32_t type) {
  switch (type) {
    case EMBERD_FLOAT32:
      return client::WireType::kFloat32;
    case EMBERD_BFLOAT16:
      return client::WireType::kBfloat16;
  }
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", type,
                                                 " is not allowed; it must be 0 (EMBERD_FLOAT32) "
                                                 "or 1 (EMBERD_BFLOAT16)"));
}

absl::StatusOr<client::Consistency> ReadConsistency(int32_t consistency) {
  switch (consistency) {
    case EMBERD_SYNC:
      return client::Consistency::kSync;
    case EMBERD_ASYNC:
      return client::Consistency::kAsync;
    case EMBERD_BOUNDED:
      return client::Consistency::kBounded;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("consistency: ", consistency,
                   " is not allowed; it must be 0 (EMBERD_SYNC), 1 (EMBERD_ASYNC) or 2 "
                   "(EMBERD_BOUNDED)"));
}

absl::StatusOr<client::IntSpan> ReadInts(const char* what, const void* ints, int64_t count,
                                         int32_t bytes) {
  if (bytes == sizeof(int32_t)) {
    ASSIGN_OR_RETURN(auto span, Array(what, static_cast<const int32_t*>(ints), count));
    return span;
  }
  if (bytes == sizeof(int64_t)) {
    ASSIGN_OR_RETURN(auto span, Array(what, static_cast<const int64_t*>(ints), count));
    return span;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": integers of ", bytes, " bytes are not allowed; they must have 4 or 8"));
}

absl::Status ReadFeature(const emberd_feature_ids& given, client::FeatureIds* feature) {
  if (given.feature == nullptr) return absl::InvalidArgumentError("feature: its name is NULL");
  feature->feature = given.feature;
  ASSIGN_OR_RETURN(client::IntSpan ids, ReadInts("ids", given.ids, given.id_count, given.id_bytes));
  ASSIGN_OR_RETURN(feature->weights, Array("weights", given.weights, given.weight_count));
  if (given.layout == EMBERD_DENSE && given.index == nullptr) {
    feature->ids = client::DenseIds{ids, given.ids_per_sample};
    return absl::OkStatus();
  }
  if (given.layout != EMBERD_DENSE && given.layout != EMBERD_RAGGED &&
      given.layout != EMBERD_SPARSE) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layout: ", given.layout,
        " is not allowed; it must be 0 (EMBERD_DENSE), 1 (EMBERD_RAGGED) or 2 (EMBERD_SPARSE)"));
  }
  ASSIGN_OR_RETURN(client::IntSpan index,
                   ReadInts("index", given.index, given.index_count, given.index_bytes));
  if (given.layout == EMBERD_DENSE) {
    const auto copy = [](auto span) { return std::vector<int64_t>(span.begin(), span.end()); };
    feature->ids = client::DenseIds{ids, given.ids_per_sample, std::visit(copy, index)};
  } else if (given.layout == EMBERD_RAGGED) {
    feature->ids = client::RaggedIds{index, ids};
  } else {
    feature->ids = client::SparseIds{index, ids, given.samples};
  }
  return absl::OkStatus();
}

absl::Status AtFeature(const char* name, const absl::Status& status) {
  return status.ok() ? status : Annotate(status, absl::StrCat("feature \"", Text(name), "\""));
}

// Floats from the first row of a gradient to the end of the last; none if no array can be that
// long.
std::optional<int64_t> FloatsOf(const emberd_gradient& gradient, int64_t row_stride) {
  if (gradient.samples < 0 || gradient.dim < 1) return std::nullopt;
  if (row_stride != 0 && row_stride < gradient.dim) return std::nullopt;
  if (gradient.samples == 0) return 0;
  const int64_t stride = row_stride == 0 ? gradient.dim : row_stride;
  const int64_t most = std::numeric_limits<int64_t>::max() - gradient.dim;
  if (gradient.samples - 1 > most / stride) return std::nullopt;
  return (gradient.samples - 1) * stride + gradient.dim;
}

// How an array begins in CPython: the head of every object, then what NumPy's C API calls
// PyArrayObject_fields, which has been the same since NumPy 1.7.
struct NumpyArray {
  int64_t references;
  const void* type;
  char* data;
  int32_t dims;
  const int64_t* shape;
  const int64_t* strides;
  const void* base;
  const void* dtype;
  int32_t flags;
};
constexpr int32_t kArrayInOnePiece = 1;  // NPY_ARRAY_C_CONTIGUOUS

bool IsOf(const emberd_numpy_kind& kind, const NumpyArray& array) {
  if (array.type != kind.type || array.dtype != kind.dtype) return false;
  if (array.dims != kind.dims || array.dims > 2) return false;
  for (int32_t i = 0; i < array.dims; ++i) {
    if (array.shape[i] != kind.shape[i]) return false;
  }
  return (array.flags & kArrayInOnePiece) != 0 && kind.alignment > 0 &&
         reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(kind.alignment) == 0;
}

}  // namespace

absl::StatusOr<client::ClientOptions> ReadClientOptions(const emberd_client_options* options) {
  ASSIGN_OR_RETURN(const emberd_client_options given, Options("emberd_client_options", options));
  client::ClientOptions result;
  ASSIGN_OR_RETURN(auto addresses, Array("addresses", given.addresses, given.address_count));
  for (const char* address : addresses) result.addresses.push_back(Text(address));
  if (given.tls != 0) {
    result.tls = client::TlsOptions{Text(given.ca_file), Text(given.certificate_file),
                                    Text(given.key_file), Text(given.server_name)};
  } else if (!absl::StrCat(Text(given.ca_file), Text(given.certificate_file), Text(given.key_file),
                           Text(given.server_name))
                  .empty()) {
    return absl::InvalidArgumentError(
        "tls: 0 is not allowed with ca_file, certificate_file, key_file or server_name; it must be "
        "1");
  }
  result.token = Text(given.token);
  result.token_file = Text(given.token_file);
  if (given.connect_timeout_ms != 0) {
    result.connect_timeout = absl::Milliseconds(given.connect_timeout_ms);
  }
  if (given.deadline_ms != 0) result.deadline = absl::Milliseconds(given.deadline_ms);
  ASSIGN_OR_RETURN(result.activation_type, ReadWireType("activation_type", given.activation_type));
  ASSIGN_OR_RETURN(result.gradient_type, ReadWireType("gradient_type", given.gradient_type));
  if (given.transport != EMBERD_AUTO && given.transport != EMBERD_TCP) {
    return absl::InvalidArgumentError(absl::StrCat("transport: ", given.transport,
                                                   " is not allowed; it must be EMBERD_AUTO or "
                                                   "EMBERD_TCP"));
  }
  if (given.transport == EMBERD_TCP) result.transport = client::TransportKind::kTcp;
  return result;
}

absl::StatusOr<client::TrainOptions> ReadTrainOptions(const emberd_train_options* options) {
  ASSIGN_OR_RETURN(const emberd_train_options given, Options("emberd_train_options", options));
  client::TrainOptions result;
  result.group = Text(given.group);
  result.rank = given.rank;
  if (given.ranks != 0) result.size = given.ranks;
  ASSIGN_OR_RETURN(result.consistency, ReadConsistency(given.consistency));
  result.staleness_bound = given.staleness_bound;
  result.pipelined = given.pipelined != 0;
  result.first_step = given.first_step;
  if (given.step_timeout_ms != 0) result.step_timeout = absl::Milliseconds(given.step_timeout_ms);
  return result;
}

absl::StatusOr<std::vector<client::FeatureIds>> ReadFeatures(const emberd_feature_ids* features,
                                                             int32_t count) {
  ASSIGN_OR_RETURN(auto given, Array("features", features, count));
  std::vector<client::FeatureIds> result(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    RETURN_IF_ERROR(AtFeature(given[i].feature, ReadFeature(given[i], &result[i])));
  }
  return result;
}

absl::StatusOr<std::vector<client::FeatureGradient>> ReadGradients(const emberd_gradient* gradients,
                                                                   const int64_t* row_strides,
                                                                   int32_t count) {
  ASSIGN_OR_RETURN(auto given, Array("gradients", gradients, count));
  std::vector<client::FeatureGradient> result(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    const emberd_gradient& gradient = given[i];
    const int64_t row_stride = row_strides == nullptr ? 0 : row_strides[i];
    if (gradient.feature == nullptr) {
      return absl::InvalidArgumentError("gradients: a feature's name is NULL");
    }
    const std::optional<int64_t> floats = FloatsOf(gradient, row_stride);
    if (!floats.has_value()) {
      return AtFeature(gradient.feature,
                       absl::InvalidArgumentError(absl::StrCat(
                           "gradient: the shape [", gradient.samples, ", ", gradient.dim,
                           "] with the row stride ", row_stride,
                           " is not allowed; the shape must be that of the activations, and the "
                           "stride 0 or at least the width")));
    }
    absl::StatusOr<absl::Span<const float>> values = Array("gradient", gradient.values, *floats);
    RETURN_IF_ERROR(AtFeature(gradient.feature, values.status()));
    result[i] = {gradient.feature, *values, gradient.samples, row_stride};
  }
  return result;
}

absl::StatusOr<std::vector<client::StepHyperparameters>> ReadHyperparameters(
    const emberd_hyperparameter* parameters, int32_t count) {
  ASSIGN_OR_RETURN(auto given, Array("hyperparameters", parameters, count));
  std::vector<client::StepHyperparameters> result;
  for (const emberd_hyperparameter& parameter : given) {
    const std::string table = Text(parameter.table);
    auto same = std::find_if(result.begin(), result.end(),
                             [&](const auto& other) { return other.table == table; });
    if (same == result.end()) same = result.insert(same, {table, {}});
    if (!same->values.emplace(Text(parameter.name), parameter.value).second) {
      return absl::InvalidArgumentError(absl::StrCat("hyperparameters: \"", Text(parameter.name),
                                                     "\" of table \"", table, "\" is repeated"));
    }
  }
  return result;
}

}  // namespace emberd::c

int32_t emberd_numpy_addresses(const void* const* arrays, const emberd_numpy_kind* kinds,
                               int32_t count, void* records, int64_t record_bytes, int64_t offset) {
  char* to = static_cast<char*>(records) + offset;
  for (int32_t i = 0; i < count; ++i, to += record_bytes) {
    const auto& array = *static_cast<const emberd::c::NumpyArray*>(arrays[i]);
    if (!emberd::c::IsOf(kinds[i], array)) return 0;
    std::memcpy(to, &array.data, sizeof(array.data));
  }
  return 1;
}
