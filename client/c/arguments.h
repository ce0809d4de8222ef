// From the arrays and strings of C to what the C++ client takes. INVALID_ARGUMENT names the field
// that cannot be meant. Internal to the C interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/c/emberd.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"
#include "client/cpp/train_stream.h"

namespace emberd::c {

inline std::string Text(const char* text) { return text != nullptr ? text : ""; }

// `what` is for the error. Not INVALID_ARGUMENT: `count` elements may be read at `array`.
template <typename T>
absl::StatusOr<absl::Span<const T>> Array(const char* what, const T* array, int64_t count) {
  if (count < 0 || (count > 0 && array == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", count, " elements", array == nullptr ? " at NULL" : "",
                     " are not allowed; give an array and the number of its elements, >= 0"));
  }
  return absl::MakeConstSpan(array, static_cast<size_t>(count));
}

// A struct with a field `size`, as the caller was compiled with it; what one side lacks is 0.
template <typename T>
absl::StatusOr<T> Options(const char* what, const T* options) {
  if (options == nullptr || options->size < sizeof(uint64_t) || options->size > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ".size: it must be sizeof(", what, "), and ", what, " not NULL"));
  }
  const char* const bytes = reinterpret_cast<const char*>(options);
  const size_t known = std::min<size_t>(options->size, sizeof(T));
  if (std::any_of(bytes + known, bytes + options->size, [](char byte) { return byte != 0; })) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": a field is set that this library, which is older, does not have"));
  }
  T complete = {};
  std::memcpy(&complete, options, known);
  return complete;
}

absl::StatusOr<client::ClientOptions> ReadClientOptions(const emberd_client_options* options);
absl::StatusOr<client::TrainOptions> ReadTrainOptions(const emberd_train_options* options);
// Spans and names point into what is given.
absl::StatusOr<std::vector<client::FeatureIds>> ReadFeatures(const emberd_feature_ids* features,
                                                             int32_t count);
// row_strides: of each; null: all 0.
absl::StatusOr<std::vector<client::FeatureGradient>> ReadGradients(const emberd_gradient* gradients,
                                                                   const int64_t* row_strides,
                                                                   int32_t count);
// For calls, which outlive the caller's strings: the names point into what is returned from now on.
template <typename Feature>
std::shared_ptr<const void> CopyNames(std::vector<Feature>* features) {
  const auto names = std::make_shared<std::deque<std::string>>();
  for (Feature& one : *features) one.feature = names->emplace_back(one.feature);
  return names;
}
absl::StatusOr<std::vector<client::StepHyperparameters>> ReadHyperparameters(
    const emberd_hyperparameter* parameters, int32_t count);

}  // namespace emberd::c
