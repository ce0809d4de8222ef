#include "server/shard/request_payload.h"

namespace emberd::server {

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: ", what));
}

absl::Status CheckAligned(absl::string_view what, const v1::SharedBlock& place) {
  if (place.offset() % kSharedAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ".offset is ", place.offset(), "; it must be a multiple of 64"));
}

absl::StatusOr<RequestPayload> FindSharedPayload(const v1::SharedBlock& place,
                                                 const RegionServer* regions) {
  RETURN_IF_ERROR(CheckAligned("payload", place));
  if (regions == nullptr) {
    return absl::FailedPreconditionError("payload is set, but this shard shares no memory");
  }
  const auto memory = regions->Find(place.region(), place.offset(), place.size());
  if (!memory.ok()) return Annotate(memory.status(), "payload");
  return RequestPayload{absl::MakeConstSpan(memory->get(), place.size()), *memory};
}

}  // namespace emberd::server
