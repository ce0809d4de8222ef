// A part that was written to the log makes the update that it would have made; bytes that are no
// part are refused, whatever they are.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/testing/seed.h"
#include "gtest/gtest.h"
#include "server/host/log/shard_log.h"
#include "shard/testing/test_engine.h"

namespace emberd::host {
namespace part_codec_test {

using shard::CheckedPart;
using shard::testing::TestBatch;
using shard::testing::TestEngine;
using shard::testing::TestShape;

constexpr int kRowWidth = 16, kLiveColumns = 11, kPartitionsHere = 2;

v1::OptimizerConfig SomeAdagrad() {
  v1::OptimizerConfig optimizer;
  optimizer.mutable_adagrad()->set_initial_accumulator(0.1);
  optimizer.set_learning_rate(0.05);
  return optimizer;
}

std::string BytesOfPart(const CheckedPart& part) {
  const EncodedPart encoded(part);
  std::string bytes;
  for (const absl::Span<const char> piece : encoded.pieces()) {
    bytes.append(piece.data(), piece.size());
  }
  return bytes;
}

class PartCodecTest : public ::testing::Test {
 protected:
  const TestShape shape_ = {.partitions = kPartitionsHere, .rows_per_partition = 32, .samples = 24};
  TestEngine live_{{Stack(shape_)}, shape_, 0, kPartitionsHere};
  TestEngine replayed_{{Stack(shape_)}, shape_, 0, kPartitionsHere};
  BufferPool pool_;
  std::mt19937_64 random_{TestSeed()};

  // With unique rows, so that gradients may be sums of these.
  static shard::StackSpec Stack(const TestShape& shape) {
    shard::StackSpec stack =
        shard::testing::OneTableStack(shape, kRowWidth, kLiveColumns, SomeAdagrad());
    stack.result_mode = v1::UNIQUE_ROWS;
    return stack;
  }

  std::shared_ptr<const CheckedPart> RandomPart() {
    TestBatch batch(RandomEntries(shape_, 3, random_), shape_, 0, kPartitionsHere, 2, 2);
    const auto prepared = *live_.Prepare(batch.view());
    const shard::StackEntries& entries = prepared->stacks()[0];
    const bool of_rows = random_() % 2 == 0;
    const size_t rows = of_rows ? entries.distinct_rows.size() : entries.samples.size();
    auto values = std::make_shared<std::vector<float>>(rows * kRowWidth);
    for (size_t i = 0; i < values->size(); ++i) {
      const bool live = i % kRowWidth < kLiveColumns;
      (*values)[i] = live ? static_cast<float>(random_() % 1000) / 300.0f - 1.5f : 0.0f;
    }
    shard::ApplyInput input;
    input.step = static_cast<int64_t>(random_() % 100);
    input.rng_seed = random_();
    input.owner = values;
    const bool zero = random_() % 4 == 0;
    if (random_() % 5 != 0) {
      input.stacks.push_back({0,
                              zero ? absl::Span<const float>() : absl::MakeConstSpan(*values),
                              {{"learning_rate", 0.25}}});
      input.stacks[0].of_rows = of_rows;
    }
    return *CheckedPart::Make(prepared, input);
  }
  // Memory as the log reads it: aligned, and owned by the part.
  auto Decode(const std::string& bytes) {
    auto owner = std::make_shared<std::vector<uint64_t>>(bytes.size() / 8 + 1);
    std::memcpy(owner->data(), bytes.data(), bytes.size());
    const absl::Span<const char> span(reinterpret_cast<const char*>(owner->data()), bytes.size());
    return DecodePart(replayed_.spec().model_id, span, owner, &replayed_.engine(), pool_);
  }
  void Apply(TestEngine& engine, std::shared_ptr<const CheckedPart> part) {
    std::promise<void> done;
    engine.engine().Apply(shard::StagedUpdate(std::move(part)), [&](const auto& result) {
      EXPECT_TRUE(result.ok()) << result.status();
      done.set_value();
    });
    done.get_future().wait();
  }
  std::vector<float> Rows(TestEngine& engine, const std::string& slot) {
    std::vector<float> all;
    for (int partition = 0; partition < kPartitionsHere; ++partition) {
      for (int row = 0; row < shape_.rows_per_partition; ++row) {
        const std::vector<float> values = engine.ReadRow(0, partition, row, kLiveColumns, slot);
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  }
};

TEST_F(PartCodecTest, WhatWasWrittenMakesTheSameUpdate) {
  for (int i = 0; i < 20; ++i) {
    const auto part = RandomPart();
    const auto read = Decode(BytesOfPart(*part));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ((*read)->step(), part->step());
    EXPECT_EQ((*read)->rng_seed(), part->rng_seed());
    EXPECT_EQ(BytesOfPart(**read), BytesOfPart(*part)) << "and is written as it was";
    Apply(live_, part);
    Apply(replayed_, *read);
    for (const std::string slot : {"", "accumulator"}) {
      const std::vector<float> live = Rows(live_, slot), replayed = Rows(replayed_, slot);
      ASSERT_EQ(std::memcmp(live.data(), replayed.data(), live.size() * sizeof(float)), 0);
    }
  }
}

// The failure that this would catch: an update that was answered, and that no restart can make
// again. Its gradients are finite, as has been checked, but their sum is not.
TEST_F(PartCodecTest, SumsThatAreNotFiniteMakeTheSameUpdate) {
  TestBatch batch(RandomEntries(shape_, 3, random_), shape_, 0, kPartitionsHere, 2, 2);
  const auto prepared = *live_.Prepare(batch.view());
  std::vector<float> values(prepared->stacks()[0].distinct_rows.size() * kRowWidth);
  values[0] = std::numeric_limits<float>::infinity();
  shard::ApplyInput input;
  input.stacks.push_back({0, values, {}});
  ASSERT_FALSE(CheckedPart::Make(prepared, input).ok()) << "they are no sums";
  input.stacks[0].of_rows = true;
  const auto part = CheckedPart::Make(prepared, input);
  ASSERT_TRUE(part.ok()) << part.status();
  const auto read = Decode(BytesOfPart(**part));
  ASSERT_TRUE(read.ok()) << read.status();
  Apply(live_, *part);
  Apply(replayed_, *read);
  const std::vector<float> live = Rows(live_, ""), replayed = Rows(replayed_, "");
  EXPECT_FALSE(std::all_of(live.begin(), live.end(), [](float v) { return std::isfinite(v); }));
  EXPECT_EQ(std::memcmp(live.data(), replayed.data(), live.size() * sizeof(float)), 0);
}

TEST_F(PartCodecTest, OtherBytesAreRefusedOrHarmless) {
  for (int i = 0; i < 300; ++i) {
    std::string bytes = BytesOfPart(*RandomPart());
    const size_t at = random_() % bytes.size();
    if (random_() % 3 == 0) {
      bytes.resize(at);
      EXPECT_FALSE(Decode(bytes).ok());
      continue;
    }
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random_() % 8));
    // A bit of a number that may be anything is nothing to see here: the log's checksums do.
    const auto read = Decode(bytes);
    if (read.ok()) Apply(replayed_, *read);
  }
}

}  // namespace part_codec_test
}  // namespace emberd::host
