// Places in memory that several processes share, as the commands of ShardBackend name them.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/region_server.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/rpc/message.h"
#include "shard/types.h"

namespace emberd::server {

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
