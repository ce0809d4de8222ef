// What the codecs of a shard's calls share: the header of a message, its payload, wherever that
// lies, and the places that it names in memory that several processes share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/region_server.h"
#include "base/status.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/rpc/message.h"
#include "shard/types.h"

namespace emberd::server {

// Where payloads begin in shared memory.
inline constexpr uint64_t kSharedAlignment = 64;

// INVALID_ARGUMENT.
absl::Status Malformed(absl::string_view what);

template <typename Header>
absl::Status ParseHeader(const rpc::IncomingMessage& message, Header* header) {
  if (header->ParseFromString(message.header())) return absl::OkStatus();
  return Malformed(absl::StrCat("its header is not a valid ", header->GetTypeName()));
}

// Whether the place begins where it may. `what` names it.
absl::Status CheckAligned(absl::string_view what, const v1::SharedBlock& place);

struct RequestPayload {
  absl::Span<const char> bytes;
  std::shared_ptr<const void> owner;
};
// In memory of `regions`, which may be null. FAILED_PRECONDITION if it is not known there.
absl::StatusOr<RequestPayload> FindSharedPayload(const v1::SharedBlock& place,
                                                 const RegionServer* regions);

// That of a request: in the message, or where its header says.
template <typename Header>
absl::StatusOr<RequestPayload> FindPayload(const rpc::IncomingMessage& message,
                                           const Header& header, const RegionServer* regions) {
  if (!header.has_payload()) return RequestPayload{message.payload(), message.owner()};
  if (!message.payload().empty()) return Malformed("a payload that is both sent and shared");
  return FindSharedPayload(header.payload(), regions);
}

// What decoded places refer to: keeps regions mapped.
using PlaceOwners = std::vector<std::shared_ptr<const void>>;

// `rows` lie in one of `regions`, or nowhere.
template <typename Value>
void EncodeFeatureRows(const shard::FeatureRows<Value>& rows, absl::Span<const NamedRegion> regions,
                       internal::v1::FeatureRows* to);
// INVALID_ARGUMENT if they are not inside of their region; FAILED_PRECONDITION, so that the caller
// sends what lies there, if the region is not known here.
template <typename Value>
absl::StatusOr<shard::FeatureRows<Value>> DecodeFeatureRows(const internal::v1::FeatureRows& from,
                                                            const RegionServer* regions,
                                                            PlaceOwners* owners);

// All but the words of passed_over, which are payload.
void EncodePlaces(const shard::SumPlaces& places, const NamedRegion& region,
                  internal::v1::StackBatchHeader* header);
absl::StatusOr<shard::SumPlaces> DecodePlaces(const internal::v1::StackBatchHeader& header,
                                              const RegionServer* regions,
                                              rpc::PayloadReader* payload, PlaceOwners* owners);

}  // namespace emberd::server
