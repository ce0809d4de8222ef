// Catches: gradients in another stack's place, halves that are added to the wrong row, and whatever
// a peer may claim of halves that it does not send.
#include "server/shard/apply_codec.h"

#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include "absl/functional/function_ref.h"
#include "base/testing/seed.h"
#include "server/shard/testing_codec.h"

namespace emberd::server {
namespace apply_codec_test {

const rpc::MessageLimits kLimits = {1 << 20};

TEST(SharedApplyTest, GradientsAreReadWhereTheyAre) {
  const SharedEnds ends(4096);
  const std::vector<float> gradients = {1, 2, 3};
  ApplyCommand sent;
  sent.mutation = {"client", 4, UpdateTag(0)};
  sent.attempt = 6;
  sent.input.stacks.push_back({1, gradients, {}});
  const auto message =
      Transport(InBlock<internal::v1::ApplyHeader>(EncodeApply(sent), ends, ends.place));
  auto got = DecodeApply(message, ends.server.get(), kLimits);
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
    return DecodeApply(Transport(message), ends.server.get(), kLimits).status();
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
  auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr, kLimits);
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
  sent.group_part = {"g", 7, 1, 3, 5};
  for (const bool skip : {false, true}) {
    sent.input.skip = skip;
    auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr, kLimits);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_TRUE(got->group_part.has_value());
    EXPECT_EQ(got->group_part->group, "g");
    EXPECT_EQ(got->group_part->generation, 7u);
    EXPECT_EQ(got->group_part->rank, 1);
    EXPECT_EQ(got->group_part->size, 3);
    EXPECT_EQ(got->group_part->step, 5);
    EXPECT_EQ(got->input.skip, skip);
  }
}

// Sums of three rows of four floats in halves, of which the first and the last have lower ones.
class HalvesTest : public testing::Test {
 protected:
  HalvesTest() {
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kWidth; ++column) {
        const float sum = row == 1 ? 1.0f + column : 1.001f * (row + 1) - column;
        sums_.push_back(sum);
        halves_.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) >> 16));
      }
    }
    for (const int32_t row : lower_rows_) {
      for (int column = 0; column < kWidth; ++column) {
        halves_.push_back(
            static_cast<uint16_t>(std::bit_cast<uint32_t>(sums_[row * kWidth + column])));
      }
    }
  }
  rpc::SharedBytes Bytes(size_t begin, size_t end) const {
    const absl::string_view all(reinterpret_cast<const char*>(halves_.data()), halves_.size() * 2);
    return {all.substr(begin, end - begin), nullptr};
  }
  // As a rank's part, with a stack of other gradients on either side.
  ApplyCommand Command(std::vector<rpc::SharedBytes> pieces) const {
    ApplyCommand sent;
    sent.group_part = {"g", 7, 0, 1, 5};
    for (int stack = 0; stack < 3; ++stack) sent.input.stacks.push_back({stack, {}, {}});
    sent.input.stacks[0].gradients = sent.input.stacks[2].gradients = others_;
    sent.input.stacks[1].of_rows = true;
    sent.pieces.push_back({1, v1::BFLOAT16, kRows, kWidth, std::move(pieces), lower_rows_});
    return sent;
  }
  // A message with these halves, `change` made to its header.
  absl::Status Decode(absl::FunctionRef<void(internal::v1::StackGradientHeader*)> change,
                      const rpc::MessageLimits& limits = kLimits) const {
    rpc::OutgoingMessage message = EncodeApply(Command({Bytes(0, halves_.size() * 2)}));
    internal::v1::ApplyHeader header;
    EXPECT_TRUE(header.ParseFromString(message.header));
    change(header.mutable_stacks(1));
    message.header = header.SerializeAsString();
    return DecodeApply(Transport(message), nullptr, limits).status();
  }

  static constexpr int kRows = 3, kWidth = 4;
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const std::vector<float> others_ = {7, 8};
  std::vector<int32_t> lower_rows_ = {0, 2};
  std::vector<float> sums_;
  std::vector<uint16_t> halves_;
};

TEST_F(HalvesTest, ArePutTogether) {
  const size_t bytes = halves_.size() * 2;
  for (size_t cut = 0; cut <= bytes; ++cut) {
    const ApplyCommand sent = Command({Bytes(0, cut), Bytes(cut, bytes)});
    auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr, kLimits);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(got->input.stacks.size(), 3u);
    EXPECT_EQ(got->input.stacks[0].gradients, absl::MakeConstSpan(others_));
    EXPECT_EQ(got->input.stacks[1].gradients, absl::MakeConstSpan(sums_));
    EXPECT_TRUE(got->input.stacks[1].of_rows);
    EXPECT_EQ(got->input.stacks[2].gradients, absl::MakeConstSpan(others_));
  }
}

TEST_F(HalvesTest, WholeSumsInPiecesArriveAsOneArray) {
  const absl::string_view all(reinterpret_cast<const char*>(sums_.data()), sums_.size() * 4);
  ApplyCommand sent = Command({{all.substr(0, 5), nullptr}, {all.substr(5), nullptr}});
  sent.pieces[0].dtype = v1::FLOAT32;
  sent.pieces[0].lower_rows.clear();
  auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr, kLimits);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->input.stacks[1].gradients, absl::MakeConstSpan(sums_));
  EXPECT_EQ(got->input.stacks[2].gradients, absl::MakeConstSpan(others_));
}

TEST_F(HalvesTest, ThatAreNotThoseOfRowsAreRefused) {
  using Header = internal::v1::StackGradientHeader;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(Decode([](Header*) {}).ok());
  EXPECT_EQ(Decode([](Header* to) { to->set_of_rows(false); }).code(), kInvalid);
  for (const int32_t width : {-4, -1, 1, 3, 8, 1 << 30, 2}) {
    EXPECT_EQ(Decode([&](Header* to) { to->set_half_width(width); }).code(), kInvalid) << width;
  }
  for (const int64_t floats : {int64_t{-4}, int64_t{0}, int64_t{8}, int64_t{16}, int64_t{13},
                               kMost - 3, kMost / 2 - 3, kMost / 4 + 1}) {
    EXPECT_EQ(Decode([&](Header* to) { to->set_floats(floats); }).code(), kInvalid) << floats;
  }
  for (const int32_t rows : {-1, 0, 1, 3, 4, 1 << 30}) {
    EXPECT_EQ(Decode([&](Header* to) { to->set_lower_rows(rows); }).code(), kInvalid) << rows;
  }
}

TEST_F(HalvesTest, OfRowsThatAreNotThereAreRefused) {
  for (const std::vector<int32_t>& rows :
       std::vector<std::vector<int32_t>>{{0, 3}, {-1, 2}, {1, 1}, {2, 0}, {0, 1 << 30}}) {
    lower_rows_ = rows;
    EXPECT_EQ(Decode([](auto*) {}).code(), kInvalid) << rows[0] << " " << rows[1];
  }
}

TEST_F(HalvesTest, TakeTheirMemoryFromTheBudget) {
  // A small message takes none, nor does one that is as small when it is put together.
  const auto rows = [](internal::v1::StackGradientHeader*) {};
  EXPECT_EQ(Decode(rows, {kRows * kWidth * 4 - 1}).code(), absl::StatusCode::kResourceExhausted);
  halves_.assign(2 * kRows * 1024, 0);
  const auto large = [](internal::v1::StackGradientHeader* to) {
    to->set_half_width(2 * 1024);
    to->set_floats(kRows * 2 * 1024);
    to->set_lower_rows(0);
  };
  lower_rows_.clear();
  const rpc::MessageLimits limits{1 << 20, rpc::MemoryBudget(30'000, "budgets.in_flight_bytes")};
  EXPECT_TRUE(Decode(large, limits).ok());
  EXPECT_EQ(limits.memory.used(), 0);
  const rpc::MessageLimits tight{1 << 20, rpc::MemoryBudget(20'000, "budgets.in_flight_bytes")};
  EXPECT_EQ(Decode(large, tight).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tight.memory.used(), 0);
}

// Those of the message, until it goes, and of what was joined; but for floats beside them, the
// message goes with the decoder.
TEST_F(HalvesTest, KeepTheMessageOnlyForOthers) {
  lower_rows_.clear();
  halves_.assign(kRows * kWidth * 1024, 0);
  constexpr int64_t kJoined = kRows * kWidth * 1024 * sizeof(float);
  for (const bool others : {false, true}) {
    const rpc::MessageLimits limits{1 << 20, rpc::MemoryBudget(1 << 20, "budgets")};
    ApplyCommand sent = Command({Bytes(0, halves_.size() * 2)});
    sent.pieces[0].width *= 1024;
    if (!others) sent.input.stacks[0].gradients = sent.input.stacks[2].gradients = {};
    rpc::MessageAssembler assembler(limits);
    auto message = assembler.Add(rpc::JoinMessage(EncodeApply(sent)));
    ASSERT_TRUE(message.ok() && message->has_value()) << message.status();
    const int64_t of_message = limits.memory.used();
    EXPECT_GT(of_message, kJoined / 2);
    auto got = DecodeApply(**message, nullptr, limits);
    ASSERT_TRUE(got.ok()) << got.status();
    message->reset();
    EXPECT_EQ(limits.memory.used(), kJoined + (others ? of_message : 0));
    EXPECT_EQ(got->payload_bytes, kJoined / 2 + (others ? 16 : 0));
    got = absl::UnknownError("gone");
    EXPECT_EQ(limits.memory.used(), 0);
  }
}

// Several stacks of them lie one after the other.
TEST_F(HalvesTest, OfSeveralStacksGoToTheirOwn) {
  ApplyCommand sent = Command({Bytes(0, halves_.size() * 2)});
  sent.input.stacks[2] = {2, {}, {}};
  sent.input.stacks[2].of_rows = true;
  sent.pieces.push_back({2, v1::BFLOAT16, 2, kWidth, {Bytes(16, 32)}});
  auto got = DecodeApply(Transport(EncodeApply(sent)), nullptr, kLimits);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->input.stacks[0].gradients, absl::MakeConstSpan(others_));
  EXPECT_EQ(got->input.stacks[1].gradients, absl::MakeConstSpan(sums_));
  ASSERT_EQ(got->input.stacks[2].gradients.size(), 8u);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(got->input.stacks[2].gradients[i]), halves_[8 + i] << 16);
  }
}

// Another header or payload: an error, or something that is read, never a crash.
TEST_F(HalvesTest, DamagedOnesAreRefusedOrHarmless) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  google::protobuf::LogSilencer no_log_of_every_damage;
  const rpc::OutgoingMessage good = EncodeApply(Command({Bytes(0, halves_.size() * 2)}));
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    rpc::OutgoingMessage message = good;
    std::string lower_rows(good.payload[1].bytes);
    message.payload[1].bytes = lower_rows;
    if (random() % 2 == 0) lower_rows[random() % lower_rows.size()] = static_cast<char>(random());
    message.header[random() % message.header.size()] = static_cast<char>(random());
    if (random() % 4 == 0) message.payload.resize(random() % message.payload.size());
    refused += !DecodeApply(Transport(message), nullptr, kLimits).ok();
  }
  EXPECT_GT(refused, 1000);
}

// Whoever writes there could change a row after it was checked.
TEST_F(HalvesTest, InSharedMemoryAreRefused) {
  const SharedEnds ends(4096);
  const auto message = InBlock<internal::v1::ApplyHeader>(
      EncodeApply(Command({Bytes(0, halves_.size() * 2)})), ends, ends.place);
  EXPECT_EQ(DecodeApply(Transport(message), ends.server.get(), kLimits).status().code(), kInvalid);
}

}  // namespace apply_codec_test
}  // namespace emberd::server
