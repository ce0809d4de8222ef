// Reading requests that nobody has checked. The messages of a training stream become the requests
// of its steps, tensors become typed spans, and a LookupRequest the input of preprocessing. Spans
// refer to the bytes of the request, and nothing is copied, except for what lies in memory shared
// with the client (shared_memory.proto): its places are checked against the region, and ids are
// copied before anybody looks at them. Names, types and shapes are checked here, values (ids,
// order, weights) by the preprocessor.
//
// Errors are INVALID_ARGUMENT unless said otherwise, and begin with the place in the request.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/regions.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/train.pb.h"
#include "emberd/v1/types.pb.h"
#include "preprocess/batch/sort_and_merge.h"
#include "server/step/served_model.h"

namespace emberd::step {

// Bytes of one element; 0 for DATA_TYPE_UNSPECIFIED and unknown types.
int64_t ElementSize(v1::DataType dtype);

// Bytes of the elements, after checking that no extent is negative.
absl::StatusOr<int64_t> ShapeBytes(const v1::Tensor& tensor, const std::string& path);

// Number of elements, after checking that no extent is negative and that data holds just these
// elements.
absl::StatusOr<int64_t> CheckedSize(const v1::Tensor& tensor, const std::string& path);

// INT32 or INT64.
absl::StatusOr<preprocess::IntSpan> IntsOf(const v1::Tensor& tensor, const std::string& path);
// FLOAT32.
absl::StatusOr<absl::Span<const float>> FloatsOf(const v1::Tensor& tensor, const std::string& path);

// "INT32"; of an unknown type its number.
std::string TypeText(v1::DataType dtype);
// "[3, 16]"
std::string ShapeText(absl::Span<const int64_t> shape);
// INVALID_ARGUMENT unless the tensor has exactly this shape.
absl::Status CheckShape(const v1::Tensor& tensor, absl::Span<const int64_t> expected,
                        const std::string& path);
absl::Status CheckRank(const v1::Tensor& tensor, int rank, const std::string& path);

// Element i, whatever the width.
inline int64_t IntAt(const preprocess::IntSpan& span, int64_t i) {
  return std::visit([i](const auto& values) -> int64_t { return values[i]; }, span);
}
inline int64_t IntCount(const preprocess::IntSpan& span) {
  return std::visit([](const auto& values) -> int64_t { return values.size(); }, span);
}

// The index of the feature that element `i` of `list`, a field of the request, names. The error
// has the names that there are.
absl::StatusOr<int> FindFeature(const ServedModel& model, const std::string& name,
                                absl::string_view list, int64_t i);

// The memory that `block`, called `path` in errors, names. FAILED_PRECONDITION if `regions` is
// null: there is none on this coordinator.
absl::StatusOr<std::shared_ptr<char>> FindBlock(const RegionServer* regions,
                                                const v1::SharedBlock& block,
                                                absl::string_view path);

// Copies the ids to where they lie in other requests.
absl::Status CopySharedIds(const RegionServer* regions, v1::LookupRequest* request);

// Refers to the request's memory.
struct LookupInput {
  std::vector<preprocess::FeatureInput> features;  // by index in the config
  std::vector<int> order;                          // features as the request lists them
  v1::DataType activation_dtype = v1::FLOAT32;
  int64_t activation_bytes = 0;  // of all features
};

// RESOURCE_EXHAUSTED if the activations would have more than `max_activation_bytes`.
absl::StatusOr<LookupInput> DecodeLookup(const v1::LookupRequest& request, const ServedModel& model,
                                         int64_t max_activation_bytes);

struct TrainUpdateRequest {
  v1::ApplyGradientsRequest gradients;  // with the number of the step
  // See TrainUpdate.
  std::string checkpoint;
  bool skip = false;
};

// One of the two is set.
struct TrainStepRequest {
  int64_t step = 0;
  int64_t bytes = 0;  // of its messages on the wire
  std::optional<v1::LookupRequest> lookup;
  std::optional<TrainUpdateRequest> update;
};

// Not thread-safe.
class TrainAssembler {
 public:
  // Takes the next message after the start; it is moved from. The request that it completed, if it
  // did. INVALID_ARGUMENT if it does not belong where it stands.
  absl::StatusOr<std::optional<TrainStepRequest>> Add(v1::TrainRequest* message, int64_t bytes);
  // Whether a request has begun and is not complete.
  bool in_request() const { return lookup_.has_value() || update_.has_value(); }

 private:
  absl::StatusOr<std::optional<TrainStepRequest>> AddLookup(v1::TrainLookup* message,
                                                            int64_t bytes);
  absl::StatusOr<std::optional<TrainStepRequest>> AddUpdate(v1::TrainUpdate* message,
                                                            int64_t bytes);

  // That have begun and are not complete.
  std::optional<TrainStepRequest> lookup_;
  std::optional<TrainStepRequest> update_;
};

}  // namespace emberd::step
