// Catches: gradients in another stack's place, a part of a group that loses its place in the step,
// and whatever a peer may claim of a payload that is not there.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "server/host/shard_codec.h"
#include "server/host/testing_codec.h"

namespace emberd::host {
namespace apply_codec_test {

TEST(SharedApplyTest, GradientsAreReadWhereTheyAre) {
  const SharedEnds ends(4096);
  const std::vector<float> gradients = {1, 2, 3};
  ApplyCommand sent;
  sent.mutation = {"client", 4, UpdateTag(0)};
  sent.attempt = 6;
  sent.input.stacks.push_back({1, gradients, {}});
  const auto message =
      Transport(InBlock<internal::v1::ApplyHeader>(EncodeApply(sent), ends, ends.place));
  auto got = DecodeApply(message, ends.server.get());
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->input.stacks[0].gradients, absl::MakeConstSpan(gradients));
  reinterpret_cast<float*>(ends.block->data())[1] = 7;
  EXPECT_EQ(got->input.stacks[0].gradients[1], 7);
}

TEST(SharedApplyTest, PlacesThatAreNotThereAreRefused) {
  const SharedEnds ends(4096);
  const std::vector<float> gradients = {1, 2, 3};
  const auto decode = [&](uint64_t region, uint64_t offset, uint64_t size, bool sent) {
    internal::v1::ApplyHeader header;
    header.set_client_id("client");
    header.set_sequence(1);
    header.set_attempt(1);
    header.add_stacks()->set_floats(3);
    header.mutable_payload()->set_region(region);
    header.mutable_payload()->set_offset(offset);
    header.mutable_payload()->set_size(size);
    rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
    if (sent) message.Append(absl::MakeConstSpan(gradients), nullptr);
    return DecodeApply(Transport(message), ends.server.get()).status();
  };
  const uint64_t region = ends.place.region();
  EXPECT_TRUE(decode(region, 64, 12, false).ok());
  EXPECT_EQ(decode(region + 1, 64, 12, false).code(), absl::StatusCode::kFailedPrecondition);
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{
           {64, 8}, {64, 16}, {60, 12}, {uint64_t{64} << 20, 12}, {0 - uint64_t{64}, 128}}) {
    EXPECT_EQ(decode(region, offset, size, false).code(), absl::StatusCode::kInvalidArgument)
        << offset << " " << size;
  }
  EXPECT_EQ(decode(region, 64, 12, true).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ApplyCodecTest, ArrivesWhole) {
  const std::vector<float> gradients = {1, 2, 3};
  ApplyCommand sent;
  sent.model_id = 1;
  sent.batch_handle = 2;
  sent.history = 3;
  sent.mutation = {"client", 4, UpdateTag(1)};
  sent.attempt = 6;
  sent.input.step = 5;
  sent.input.stacks.push_back({0, {}, {}});
  sent.input.stacks.push_back({1, gradients, {{"learning_rate", 0.25}, {"beta2", 0.999}}});
  sent.input.stacks[1].of_rows = true;
  auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->model_id, 1u);
  EXPECT_EQ(got->history, 3u);
  EXPECT_EQ(got->mutation.client_id, "client");
  EXPECT_EQ(got->mutation.sequence, 4u);
  EXPECT_EQ(got->mutation.tag, UpdateTag(1));
  EXPECT_EQ(got->attempt, 6u);
  EXPECT_EQ(got->input.step, 5);
  EXPECT_TRUE(got->input.stacks[0].gradients.empty());
  EXPECT_EQ(got->input.stacks[1].gradients, absl::MakeConstSpan(gradients));
  EXPECT_FALSE(got->input.stacks[0].of_rows);
  EXPECT_TRUE(got->input.stacks[1].of_rows);
  EXPECT_EQ(got->input.stacks[1].hyperparameters, sent.input.stacks[1].hyperparameters);
}

TEST(ApplyCodecTest, APartOfAGroupArrivesWhole) {
  ApplyCommand sent;
  GroupPart& part = sent.group_part.emplace();
  part.set_group("g");
  part.set_generation(7);
  part.set_rank(1);
  part.set_size(3);
  part.set_step(5);
  for (const bool skip : {false, true}) {
    sent.input.skip = skip;
    auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_TRUE(got->group_part.has_value());
    EXPECT_EQ(got->group_part->group(), "g");
    EXPECT_EQ(got->group_part->generation(), 7u);
    EXPECT_EQ(got->group_part->rank(), 1);
    EXPECT_EQ(got->group_part->size(), 3);
    EXPECT_EQ(got->group_part->step(), 5);
    EXPECT_EQ(got->input.skip, skip);
  }
}

}  // namespace apply_codec_test
}  // namespace emberd::host
