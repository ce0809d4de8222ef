#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "server/host/shard_codec.h"
#include "server/host/testing_codec.h"

namespace emberd::host {
namespace request_payload_test {

TEST(PlacesTest, ArriveWhereTheRegionIsMapped) {
  const SharedEnds ends(4096);
  auto memory = std::make_shared<GatherMemory>();
  GatherCommand sent = MakeGather(memory);
  sent.region = {ends.place.region(), ends.server->Region(ends.place.region())};
  auto* const floats = reinterpret_cast<float*>(sent.region.memory->data());
  sent.places.stacks.push_back(
      {3, {{floats, 8, 8, 0, 4}, {nullptr, 8, 8, 4, 0}, {floats + 40, 8, 16, 4, 3}}, {5}});
  auto got = DecodeGather(Transport(EncodeGather(sent)), kPartitions, ends.server.get());
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->places.stacks.size(), 1u);
  const shard::SumPlaces& places = got->places.stacks[0];
  EXPECT_EQ(places.stack, 3);
  EXPECT_EQ(places.passed_over, std::vector<uint32_t>{5});
  ASSERT_EQ(places.features.size(), 3u);
  EXPECT_EQ(places.features[0].first, floats);
  EXPECT_EQ(places.features[1].first, nullptr);
  EXPECT_EQ(places.features[2](6), floats + 40 + 2 * 16);
  EXPECT_EQ(got->stacks[0].segments[1].gains[2], 5.0f);

  // Of another life of the shard, so that the caller sends it anew; nowhere; beyond the end.
  EXPECT_EQ(DecodeGather(Transport(EncodeGather(sent)), kPartitions).status().code(),
            absl::StatusCode::kFailedPrecondition);
  sent.region.name += 1;
  EXPECT_EQ(
      DecodeGather(Transport(EncodeGather(sent)), kPartitions, ends.server.get()).status().code(),
      absl::StatusCode::kFailedPrecondition);
  sent.region.name -= 1;
  const auto refused = [&](const shard::FeatureRows<float>& rows) {
    sent.places.stacks[0].features[0] = rows;
    return DecodeGather(Transport(EncodeGather(sent)), kPartitions, ends.server.get())
        .status()
        .code();
  };
  float* const last = floats + sent.region.memory->size() / sizeof(float) - 8;
  EXPECT_EQ(refused({last, 8, 8, 0, 1}), absl::StatusCode::kOk);
  EXPECT_EQ(refused({last, 8, 8, 0, 2}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({last, 9, 9, 0, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({floats, 8, 7, 0, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({floats, -8, 8, 0, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({floats, 8, 8, -1, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused({floats, 8, 2147483647, 0, 2147483647}), absl::StatusCode::kInvalidArgument);
}

TEST(PlacesTest, GradientsAreReadWhereTheyLie) {
  const SharedEnds ends(4096);
  ApplyCommand sent;
  sent.model_id = 1;
  sent.mutation = {"client", 1, UpdateTag(1)};
  sent.attempt = 1;
  const NamedRegion region = {ends.place.region(), ends.server->Region(ends.place.region())};
  sent.regions = {region};
  const auto* const floats = reinterpret_cast<const float*>(region.memory->data());
  sent.input.stacks.push_back({2, {}, {}, {{floats + 8, 8, 8, 0, 5}, {}}});
  const auto decode = [&] { return DecodeApply(Transport(EncodeApply(sent)), ends.server.get()); };
  auto got = decode();
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->input.stacks[0].features.size(), 2u);
  EXPECT_EQ(got->input.stacks[0].features[0].first, floats + 8);
  EXPECT_EQ(got->input.stacks[0].features[0].samples, 5);
  EXPECT_EQ(got->input.stacks[0].features[1].first, nullptr);
  sent.input.stacks[0].features[0].samples = 1 << 30;
  EXPECT_EQ(decode().status().code(), absl::StatusCode::kInvalidArgument);
  sent.regions[0].name += 1;
  EXPECT_EQ(decode().status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace request_payload_test
}  // namespace emberd::host
