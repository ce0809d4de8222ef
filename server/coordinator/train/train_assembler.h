// Puts the messages of a training stream's requests together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/train.pb.h"

namespace emberd::coordinator {

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

}  // namespace emberd::coordinator
