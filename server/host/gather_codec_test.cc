#include <algorithm>
#include <cstring>
#include <random>

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "server/host/shard_codec.h"
#include "server/host/testing_codec.h"

namespace emberd::host {
namespace gather_codec_test {

TEST(GatherCodecTest, AGatherArrivesWhole) {
  GatherCommand sent = MakeGather(std::make_shared<GatherMemory>());
  sent.stacks[0].single_rows = true;
  sent.activation_dtype = v1::BFLOAT16;
  auto got = DecodeGather(Transport(EncodeGather(sent)), kPartitions);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->model_id, 11u);
  EXPECT_EQ(got->batch_handle, 12u);
  EXPECT_EQ(got->batch_ttl, absl::Milliseconds(1500));
  EXPECT_EQ(got->activation_dtype, v1::BFLOAT16);
  ASSERT_EQ(got->stacks.size(), 1u);
  const auto& from = sent.stacks[0];
  const auto& to = got->stacks[0];
  EXPECT_EQ(to.stack, 3);
  EXPECT_EQ(to.sample_count, 7);
  EXPECT_EQ(to.slots, 2);
  EXPECT_EQ(to.minibatches, 1);
  EXPECT_TRUE(to.single_rows);
  EXPECT_EQ(to.feature_samples, from.feature_samples);
  ASSERT_EQ(to.segments.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(to.segments[i].base, from.segments[i].base);
    EXPECT_EQ(to.segments[i].row_ends, from.segments[i].row_ends);
    EXPECT_EQ(to.segments[i].embedding_ids, from.segments[i].embedding_ids);
    EXPECT_EQ(to.segments[i].sample_ids, from.segments[i].sample_ids);
    EXPECT_EQ(to.segments[i].gains, from.segments[i].gains);
    ASSERT_EQ(to.spans[i].size(), from.spans[i].size());
    for (size_t k = 0; k < to.spans[i].size(); ++k) {
      EXPECT_EQ(to.spans[i][k].slot_begin, from.spans[i][k].slot_begin);
      EXPECT_EQ(to.spans[i][k].sample_begin, from.spans[i][k].sample_begin);
      EXPECT_EQ(to.spans[i][k].count, from.spans[i][k].count);
    }
  }
}

TEST(GatherCodecTest, ADecodedGatherOutlivesItsMessage) {
  auto memory = std::make_shared<GatherMemory>();
  absl::StatusOr<GatherCommand> got =
      DecodeGather(Transport(EncodeGather(MakeGather(memory))), kPartitions);
  memory.reset();
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->stacks[0].segments[1].gains[2],
            5.0f);  // a dangling span would be found by AddressSanitizer
}

TEST(GatherCodecTest, SumsArriveWhole) {
  const std::vector<int32_t> samples = {0, 4};
  const std::vector<float> sums(16, 2.5f);
  GatherResult sent;
  sent.history = 77;
  sent.stacks.push_back({0, samples, sums, 9});
  sent.stacks.push_back({1, {}, {}, 0});
  auto got = DecodeGatherResult(Transport(EncodeGatherResult(sent)));
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->history, 77u);
  ASSERT_EQ(got->stacks.size(), 2u);
  EXPECT_EQ(got->stacks[0].samples, absl::MakeConstSpan(samples));
  EXPECT_EQ(got->stacks[0].sums, absl::MakeConstSpan(sums));
  EXPECT_EQ(got->stacks[0].rows_gathered, 9);
  EXPECT_TRUE(got->stacks[1].samples.empty());
}

TEST(GatherCodecTest, UniqueRowsArriveWhole) {
  const std::vector<int32_t> samples = {3};
  const std::vector<float> sums(8, 1.5f);
  const std::vector<char> rows(3 * 16, 'r');
  GatherResult sent;
  sent.history = 78;
  sent.stacks.push_back({1, samples, sums, 2});
  sent.rows.push_back({0, 16, rows, 9});
  sent.rows.push_back({2, 32, {}, 0, /*rounded=*/true});
  auto got = DecodeGatherResult(Transport(EncodeGatherResult(sent)));
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->stacks.size(), 1u);
  EXPECT_EQ(got->stacks[0].sums, absl::MakeConstSpan(sums));
  ASSERT_EQ(got->rows.size(), 2u);
  EXPECT_EQ(got->rows[0].stack, 0);
  EXPECT_EQ(got->rows[0].row_bytes, 16);
  EXPECT_EQ(got->rows[0].rows, absl::MakeConstSpan(rows));
  EXPECT_EQ(got->rows[0].rows_gathered, 9);
  EXPECT_FALSE(got->rows[0].rounded);
  EXPECT_EQ(got->rows[1].stack, 2);
  EXPECT_TRUE(got->rows[1].rows.empty());
  EXPECT_TRUE(got->rows[1].rounded);
}

TEST(GatherCodecTest, RefusesRowsOfOtherSizesThanThePayload) {
  const std::vector<char> rows(48);
  const auto decode = [&](int32_t count, int32_t row_bytes) {
    internal::v1::GatherReply header;
    internal::v1::StackRows* stack = header.add_rows();
    stack->set_rows(count);
    stack->set_row_bytes(row_bytes);
    rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
    message.Append(absl::MakeConstSpan(rows), nullptr);
    return DecodeGatherResult(Transport(message)).status();
  };
  EXPECT_TRUE(decode(3, 16).ok());
  for (const auto& [count, row_bytes] :
       std::vector<std::pair<int32_t, int32_t>>{{2, 16},
                                                {4, 16},
                                                {-3, -16},
                                                {-1, 16},
                                                {48, 1 << 30},
                                                {0, 0},
                                                {1, 46},
                                                {2147483647, 2147483644}}) {
    EXPECT_EQ(decode(count, row_bytes).code(), absl::StatusCode::kInvalidArgument)
        << count << " x " << row_bytes;
  }
}

TEST(SharedResultTest, ArrivesWhereTheCallerWantsIt) {
  const SharedEnds ends(4096);
  std::vector<int32_t> samples = {0, 4};
  const std::vector<float> sums(16, 2.5f);
  const std::vector<char> rows(3 * 16, 'r');
  GatherResult sent;
  sent.stacks.push_back({0, samples, sums, 9});
  sent.rows.push_back({1, 16, rows, 3});
  const auto room = FindAnswerRoom(ends.server.get(), ends.place);
  ASSERT_TRUE(room.ok()) << room.status();
  const rpc::OutgoingMessage message = EncodeGatherResult(sent, *room);
  EXPECT_TRUE(message.payload.empty());
  auto got = DecodeGatherResult(Transport(message), ends.OfCaller());
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->stacks[0].sums, absl::MakeConstSpan(sums));
  EXPECT_EQ(got->rows[0].rows, absl::MakeConstSpan(rows));
  // A shard that writes there later changes no sample that was checked.
  std::memset(ends.block->data(), 0x7f, 4096);
  EXPECT_EQ(got->stacks[0].samples, absl::MakeConstSpan(samples));
}

// Sums that the engine has put into the room are left there, and those that it has put where they
// are read are not sent at all.
TEST(SharedResultTest, SumsStayWhereTheEngineHasPutThem) {
  const SharedEnds ends(4096);
  const auto room = FindAnswerRoom(ends.server.get(), ends.place);
  ASSERT_TRUE(room.ok()) << room.status();
  const std::vector<int32_t> samples = {0, 4, 5};
  auto* const there = reinterpret_cast<float*>(room->memory.get() + 128);
  std::fill_n(there, 8, 4.5f);
  GatherResult sent;
  sent.stacks.push_back({0, samples, absl::MakeConstSpan(there, 8), 9, 1, true});
  sent.stacks.push_back({1, samples, {}, 9, 0, true});
  const rpc::OutgoingMessage message = EncodeGatherResult(sent, *room);
  EXPECT_TRUE(message.payload.empty());
  auto got = DecodeGatherResult(Transport(message), ends.OfCaller());
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->stacks[0].placed);
  EXPECT_EQ(got->stacks[0].rows, 1);
  EXPECT_EQ(got->stacks[0].samples, absl::MakeConstSpan(samples));
  EXPECT_EQ(got->stacks[0].sums, absl::MakeConstSpan(there, 8));
  EXPECT_EQ(reinterpret_cast<const char*>(got->stacks[0].sums.data()), ends.block->data() + 128);
  EXPECT_TRUE(got->stacks[1].placed);
  EXPECT_TRUE(got->stacks[1].sums.empty());
  // A shard that says they lie elsewhere is not believed.
  internal::v1::GatherReply header;
  internal::v1::StackSums* const stack = header.add_stacks();
  stack->set_placed(true);
  stack->set_rows(1);
  stack->set_width(8);
  for (const uint64_t offset : {uint64_t{2}, uint64_t{4096 - 28}, ~uint64_t{3}}) {
    stack->set_sums_offset(offset);
    EXPECT_FALSE(
        DecodeGatherResult(Transport(rpc::OutgoingMessage::WithHeader(header)), ends.OfCaller())
            .ok())
        << offset;
  }
}

TEST(SharedResultTest, WhatDoesNotFitIsSent) {
  const SharedEnds ends(64);
  const std::vector<int32_t> samples(17, 1);
  GatherResult sent;
  sent.stacks.push_back({0, samples, {}, 9});
  const auto room = FindAnswerRoom(ends.server.get(), ends.place);
  ASSERT_TRUE(room.ok()) << room.status();
  auto got = DecodeGatherResult(Transport(EncodeGatherResult(sent, *room)), ends.OfCaller());
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->stacks[0].samples, absl::MakeConstSpan(samples));
}

TEST(SharedResultTest, PlacesOutsideOfTheRegionAreRefused) {
  const SharedEnds ends(4096);
  const auto find = [&](uint64_t region, uint64_t offset, uint64_t size) {
    v1::SharedBlock place;
    place.set_region(region);
    place.set_offset(offset);
    place.set_size(size);
    return FindAnswerRoom(ends.server.get(), place);
  };
  const uint64_t region = ends.place.region();
  EXPECT_NE(find(region, 64, 100)->memory, nullptr);
  EXPECT_EQ(find(region, 0, 0)->memory, nullptr);
  EXPECT_EQ(find(region + 1, 0, 100)->memory, nullptr) << "of another life of the shard";
  EXPECT_EQ(FindAnswerRoom(nullptr, ends.place)->memory, nullptr);
  EXPECT_EQ(find(region, 63, 100).status(),
            absl::InvalidArgumentError("answer.offset is 63; it must be a multiple of 64"));
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{
           {uint64_t{64} << 20, 1}, {0, uint64_t{1} << 40}, {0 - uint64_t{64}, 128}}) {
    EXPECT_EQ(find(region, offset, size).status().code(), absl::StatusCode::kInvalidArgument)
        << offset << " " << size;
  }
}

TEST(SharedResultTest, AnAnswerThatIsNotWhereItShouldBeIsRefused) {
  const SharedEnds ends(64);
  const std::vector<char> bytes(4);
  const auto decode = [&](uint64_t shared, bool sent, const AnswerRoom& room) {
    internal::v1::GatherReply header;
    header.set_shared_bytes(shared);
    header.add_rows()->set_row_bytes(4);
    header.mutable_rows(0)->set_rows(1);
    rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
    if (sent) message.Append(absl::MakeConstSpan(bytes), nullptr);
    return DecodeGatherResult(Transport(message), room).status().code();
  };
  EXPECT_EQ(decode(4, false, ends.OfCaller()), absl::StatusCode::kOk);
  EXPECT_EQ(decode(4, true, ends.OfCaller()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decode(8, false, ends.OfCaller()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decode(68, false, ends.OfCaller()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decode(4, false, {}), absl::StatusCode::kInvalidArgument);
}

TEST(SharedGatherTest, AGatherIsCopiedBeforeItIsLookedAt) {
  const SharedEnds ends(4096);
  const GatherCommand sent = MakeGather(std::make_shared<GatherMemory>());
  const rpc::MessageLimits limits{4096, rpc::MemoryBudget(10'000, "budgets.in_flight_bytes")};
  const auto message =
      Transport(InBlock<internal::v1::GatherHeader>(EncodeGather(sent), ends, ends.place));
  {
    auto got = DecodeGather(message, kPartitions, ends.server.get(), limits);
    ASSERT_TRUE(got.ok()) << got.status();
    std::memset(ends.block->data(), 0x7f, 4096);
    EXPECT_EQ(got->model_id, 11u);
    EXPECT_EQ(got->stacks[0].segments[1].sample_ids, sent.stacks[0].segments[1].sample_ids);
    EXPECT_EQ(got->stacks[0].segments[1].gains, sent.stacks[0].segments[1].gains);
  }
  EXPECT_EQ(limits.memory.used(), 0);
  EXPECT_EQ(DecodeGather(message, kPartitions, ends.server.get(), {16}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DecodeGather(message, kPartitions).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// The header of another message, counts that lie, sizes that overflow: each must be an error, never
// a crash.
TEST(GatherCodecTest, DamagedMessagesAreRefusedOrHarmless) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  google::protobuf::LogSilencer no_log_of_every_damage;
  const rpc::OutgoingMessage good = EncodeGather(MakeGather(std::make_shared<GatherMemory>()));
  const std::vector<int32_t> samples = {0, 4};
  const std::vector<float> sums(16);
  const std::vector<char> rows(48);
  const rpc::OutgoingMessage good_reply =
      EncodeGatherResult({5, {{0, samples, sums, 2}}, {{1, 16, rows, 3}}, nullptr});
  int refused = 0, refused_replies = 0;
  for (int i = 0; i < 5'000; ++i) {
    rpc::OutgoingMessage message = good;
    message.header[random() % message.header.size()] = static_cast<char>(random());
    if (random() % 4 == 0) message.payload.resize(random() % message.payload.size());
    const rpc::IncomingMessage arrived = Transport(message);
    refused += !DecodeGather(arrived, kPartitions).ok();
    DecodeGatherResult(arrived).IgnoreError();

    message = good_reply;
    message.header[random() % message.header.size()] = static_cast<char>(random());
    refused_replies += !DecodeGatherResult(Transport(message)).ok();
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(refused_replies, 100);
}

}  // namespace gather_codec_test
}  // namespace emberd::host
