// Puts the messages of a training stream's requests together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/train.pb.h"

namespace emberd::server {

// A whole request. One of the two is set.
struct TrainStepRequest {
  int64_t step = 0;
  int64_t bytes = 0;  // of all its messages on the wire
  std::optional<v1::LookupRequest> lookup;
  std::optional<v1::ApplyGradientsRequest> update;  // with the number of the step
  // With the update: see TrainUpdate.
  std::string checkpoint;
  bool skip = false;
};

// Not thread-safe.
class TrainAssembler {
 public:
  // Takes the next message after the start; it is moved from. The request, if this message
  // completed one. INVALID_ARGUMENT if it does not belong where it stands.
  absl::StatusOr<std::optional<TrainStepRequest>> Add(v1::TrainRequest* message, int64_t bytes);
  // Whether a request has begun and is not complete.
  bool in_request() const { return request_.has_value(); }

 private:
  absl::Status AddLookup(v1::TrainLookup* message);
  absl::Status AddUpdate(v1::TrainUpdate* message);

  std::optional<TrainStepRequest> request_;
};

}  // namespace emberd::server
