#include "server/shard/request_payload.h"

#include <cstdint>
#include <utility>

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

template <typename Value>
void EncodeFeatureRows(const shard::FeatureRows<Value>& rows, absl::Span<const NamedRegion> regions,
                       internal::v1::FeatureRows* to) {
  to->set_width(static_cast<int32_t>(rows.width));
  to->set_stride(static_cast<int32_t>(rows.stride));
  to->set_first_sample(static_cast<int32_t>(rows.first_sample));
  to->set_samples(static_cast<int32_t>(rows.samples));
  const auto* const first = reinterpret_cast<const char*>(rows.first);
  for (const NamedRegion& region : regions) {
    if (first == nullptr || region.memory == nullptr) continue;
    const char* const begin = region.memory->data();
    if (first < begin || first >= begin + region.memory->size()) continue;
    to->set_region(region.name);
    to->set_offset(first - begin);
  }
}
template void EncodeFeatureRows(const shard::FeatureRows<float>&, absl::Span<const NamedRegion>,
                                internal::v1::FeatureRows*);
template void EncodeFeatureRows(const shard::FeatureRows<const float>&,
                                absl::Span<const NamedRegion>, internal::v1::FeatureRows*);

template <typename Value>
absl::StatusOr<shard::FeatureRows<Value>> DecodeFeatureRows(const internal::v1::FeatureRows& from,
                                                            const RegionServer* regions,
                                                            PlaceOwners* owners) {
  shard::FeatureRows<Value> rows = {nullptr, from.width(), from.stride(), from.first_sample(),
                                    from.samples()};
  if (from.region() == 0) return rows;
  if (from.width() < 0 || from.stride() < from.width() || from.samples() < 0 ||
      from.first_sample() < 0 || from.offset() % sizeof(float) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed message: a feature's rows lie at offset ", from.offset(), ", ",
                     from.stride(), " floats apart, of ", from.width(), " each, ", from.samples(),
                     " samples from sample ", from.first_sample()));
  }
  if (regions == nullptr) {
    return absl::FailedPreconditionError("a region is named, but this shard shares no memory");
  }
  const uint64_t floats =
      from.samples() == 0
          ? 0
          : uint64_t(from.samples() - 1) * uint64_t(from.stride()) + uint64_t(from.width());
  auto memory = regions->Find(from.region(), from.offset(), floats * sizeof(float));
  if (!memory.ok()) return Annotate(memory.status(), "a feature's rows");
  rows.first = reinterpret_cast<Value*>(memory->get());
  owners->push_back(*std::move(memory));
  return rows;
}
template absl::StatusOr<shard::FeatureRows<float>> DecodeFeatureRows(
    const internal::v1::FeatureRows&, const RegionServer*, PlaceOwners*);
template absl::StatusOr<shard::FeatureRows<const float>> DecodeFeatureRows(
    const internal::v1::FeatureRows&, const RegionServer*, PlaceOwners*);

void EncodePlaces(const shard::SumPlaces& places, const NamedRegion& region,
                  internal::v1::StackBatchHeader* header) {
  for (const shard::FeatureRows<float>& rows : places.features) {
    EncodeFeatureRows(rows, absl::MakeConstSpan(&region, 1), header->add_places());
  }
  header->set_passes_over(!places.passed_over.empty());
}

absl::StatusOr<shard::SumPlaces> DecodePlaces(const internal::v1::StackBatchHeader& header,
                                              const RegionServer* regions,
                                              rpc::PayloadReader* payload, PlaceOwners* owners) {
  shard::SumPlaces places;
  places.stack = header.stack();
  for (const internal::v1::FeatureRows& rows : header.places()) {
    ASSIGN_OR_RETURN(places.features.emplace_back(),
                     DecodeFeatureRows<float>(rows, regions, owners));
  }
  if (!header.passes_over()) return places;
  ASSIGN_OR_RETURN(const auto words,
                   payload->Int32s((int64_t{header.sample_count()} + 31) / 32, "passed_over"));
  places.passed_over.assign(words.begin(), words.end());
  return places;
}

}  // namespace emberd::server
