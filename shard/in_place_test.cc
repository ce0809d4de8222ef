// Sums that are written where they are read, and gradients that are read where they were written.
// Both must give the bits of sums and gradients that are copied, whichever samples are passed over,
// and touch no memory beside the rows that they are given: it may be another feature's.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace in_place_test {

using testing::OneTableStack;
using testing::RandomEntries;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestShape;

constexpr float kUntouched = -7.25f;
constexpr TestShape kShape = {.partitions = 2, .rows_per_partition = 50, .samples = 90};
const std::vector<int64_t> kFeatureSamples = {40, 0, 50};

v1::OptimizerConfig Adagrad() {
  v1::OptimizerConfig optimizer;
  optimizer.set_learning_rate(0.1);
  optimizer.mutable_adagrad()->set_initial_accumulator(0.1);
  return optimizer;
}

// Memory of a caller for rows of all samples, each `stride` floats from the next, the features in
// reverse order.
class Rows {
 public:
  Rows(int width, int64_t stride)
      : width_(width), stride_(stride), values_(kShape.samples * stride, kUntouched) {}

  template <typename Value>
  std::vector<FeatureRows<Value>> Features() {
    std::vector<FeatureRows<Value>> features;
    int64_t sample = 0, left = kShape.samples;
    for (const int64_t samples : kFeatureSamples) {
      left -= samples;
      features.push_back({values_.data() + left * stride_, width_, stride_, sample, samples});
      sample += samples;
    }
    return features;
  }
  float* Of(int64_t sample) {
    for (const auto& feature : Features<float>()) {
      if (sample < feature.first_sample + feature.samples) return feature(sample);
    }
    return nullptr;
  }
  // Beside the rows.
  bool GapsAreUntouched() const {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (static_cast<int64_t>(i) % stride_ >= width_ && values_[i] != kUntouched) return false;
    }
    return true;
  }

 private:
  const int width_;
  const int64_t stride_;
  std::vector<float> values_;
};

class InPlaceTest : public ::testing::TestWithParam<int> {
 protected:
  InPlaceTest() : random_(TestSeed()) {}

  std::unique_ptr<TestEngine> MakeEngine(v1::ResultMode mode = v1::AUTO) {
    StackSpec stack = OneTableStack(kShape, width_, width_, Adagrad());
    stack.result_mode = mode;
    return std::make_unique<TestEngine>(std::vector<StackSpec>{stack}, kShape, 0, 2);
  }
  std::unique_ptr<TestBatch> MakeBatch() {
    auto batch = std::make_unique<TestBatch>(RandomEntries(kShape, 2, random_), kShape, 0, 2,
                                             /*slots=*/2, /*minibatches=*/2);
    batch->feature_samples() = kFeatureSamples;
    batch->Refresh();
    return batch;
  }
  // About every third sample.
  std::vector<uint32_t> SomeSamples() {
    std::vector<uint32_t> bits((kShape.samples + 31) / 32);
    for (int s = 0; s < kShape.samples; ++s) {
      if (random_() % 3 == 0) bits[s / 32] |= 1u << (s % 32);
    }
    return bits;
  }
  static GatherOutput Gather(TestEngine& engine, const std::shared_ptr<const Batch>& batch,
                             const GatherPlaces& places) {
    std::promise<GatherOutput> done;
    engine.engine().Gather(batch, places, [&](auto output) { done.set_value(*std::move(output)); });
    return done.get_future().get();
  }

  const int width_ = GetParam();
  std::mt19937_64 random_;
};

TEST_P(InPlaceTest, SumsHaveTheSameBitsWhereverTheyAreWritten) {
  const auto engine = MakeEngine(), usual = MakeEngine(v1::PARTIAL_SUMS);
  for (int round = 0; round < 20; ++round) {
    const auto batch = MakeBatch();
    const StackSums expected = usual->Gather(*usual->Prepare(batch->view())).at(0);
    Rows rows(width_, width_ + round % 3 * 5);
    GatherPlaces places;
    places.stacks.push_back({0, rows.Features<float>(), {}});
    if (round % 4 > 0) places.stacks[0].passed_over = SomeSamples();
    alignas(64) static char memory[1 << 16];
    const size_t room_bytes = round % 2 == 0 ? 0 : sizeof(memory);
    places.room = absl::MakeSpan(memory, room_bytes);
    const auto prepared =
        *engine->engine().PrepareBatch(engine->spec().model_id, {batch->view()}, nullptr, places);
    const GatherOutput output = Gather(*engine, prepared, places);
    ASSERT_EQ(output.sums.size(), 1u);
    const StackSums& sums = output.sums[0];
    ASSERT_TRUE(sums.placed);
    ASSERT_EQ(sums.samples, expected.samples);
    int64_t returned = 0;
    std::vector<bool> written(kShape.samples);
    for (size_t i = 0; i < sums.samples.size(); ++i) {
      const int32_t sample = sums.samples[i];
      const bool passed_over = places.stacks[0].PassesOver(sample);
      const float* row = passed_over ? sums.sums.data() + returned++ * width_ : rows.Of(sample);
      written[sample] = !passed_over;
      ASSERT_EQ(std::memcmp(row, expected.sums.data() + i * width_, width_ * sizeof(float)), 0)
          << "round " << round << ", sample " << sample;
    }
    EXPECT_EQ(sums.rows, returned);
    for (int s = 0; s < kShape.samples; ++s) {
      EXPECT_TRUE(written[s] || *rows.Of(s) == kUntouched) << "sample " << s;
    }
    EXPECT_TRUE(rows.GapsAreUntouched());
    if (returned > 0 && room_bytes > 0) {
      EXPECT_EQ(reinterpret_cast<const char*>(sums.sums.data()), memory);
    }
  }
}

TEST_P(InPlaceTest, UniqueRowsAreReturnedWhereTheyAreAskedFor) {
  const auto engine = MakeEngine(v1::UNIQUE_ROWS);
  const auto batch = MakeBatch();
  Rows rows(width_, width_);
  GatherPlaces places;
  places.stacks.push_back({0, rows.Features<float>(), {}});
  const auto prepared =
      *engine->engine().PrepareBatch(engine->spec().model_id, {batch->view()}, nullptr, places);
  const GatherOutput output = Gather(*engine, prepared, places);
  EXPECT_EQ(output.rows.size(), 1u);
  EXPECT_TRUE(output.sums.empty());
}

TEST_P(InPlaceTest, PlacesThatAreNotThoseOfTheBatchAreRefused) {
  const auto engine = MakeEngine();
  const auto batch = MakeBatch();
  Rows rows(width_, width_);
  const auto refused = [&](const auto& spoil) {
    GatherPlaces places;
    places.stacks.push_back({0, rows.Features<float>(), {}});
    spoil(&places.stacks[0]);
    return engine->engine()
        .PrepareBatch(engine->spec().model_id, {batch->view()}, nullptr, places)
        .status()
        .code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(refused([](SumPlaces*) {}), absl::StatusCode::kOk);
  EXPECT_EQ(refused([](SumPlaces* places) { places->features.pop_back(); }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { ++places->features[0].samples; }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { places->features[2].first_sample = 0; }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { --places->features[0].stride; }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { --places->features[0].width; }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { places->features[0].first = nullptr; }), kInvalid);
  EXPECT_EQ(refused([](SumPlaces* places) { places->passed_over = {1}; }), kInvalid);
}

// One feature has no gradient, which is a zero gradient.
TEST_P(InPlaceTest, GradientsGiveTheSameBitsWhereverTheyLie) {
  const auto copied = MakeEngine(), in_place = MakeEngine();
  std::uniform_real_distribution<float> value(-1, 1);
  for (int round = 0; round < 12; ++round) {
    const auto batch = MakeBatch();
    Rows rows(width_, width_ + round % 3 * 3);
    auto features = rows.Features<const float>();
    const bool missing = round % 4 == 3;
    std::vector<float> gradients;
    const auto prepared = *copied->Prepare(batch->view());
    for (const int32_t sample : absl::Span<const int32_t>(prepared->stacks()[0].samples)) {
      const bool zero = missing && sample < kFeatureSamples[0];
      for (int c = 0; c < width_; ++c) {
        rows.Of(sample)[c] = value(random_);
        gradients.push_back(zero ? 0 : rows.Of(sample)[c]);
      }
    }
    if (missing) features[0] = {};
    ApplyInput as_values, as_places;
    as_values.stacks.push_back({0, gradients, {}});
    as_places.stacks.push_back({0, {}, {}, features});
    copied->Apply(prepared, as_values);
    in_place->Apply(*in_place->Prepare(batch->view()), as_places);
    for (int p = 0; p < kShape.partitions; ++p) {
      for (int row = 0; row < kShape.rows_per_partition; ++row) {
        const auto expected = copied->ReadRow(0, p, row, width_);
        const auto found = in_place->ReadRow(0, p, row, width_);
        ASSERT_EQ(std::memcmp(expected.data(), found.data(), width_ * sizeof(float)), 0)
            << "round " << round << ", partition " << p << ", row " << row;
      }
    }
  }
}

// Their owner may write there until the update is made. What it writes is its own affair, but no
// table gets what is not a number.
TEST_P(InPlaceTest, GradientsThatAreFiniteNoMoreCountAsZero) {
  const auto spoilt = MakeEngine(), zeroed = MakeEngine();
  const auto batch = MakeBatch();
  Rows bad(width_, width_), good(width_, width_);
  for (int s = 0; s < kShape.samples; ++s) {
    for (int c = 0; c < width_; ++c) {
      const bool is_bad = random_() % 5 == 0;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      const float infinity = std::numeric_limits<float>::infinity();
      good.Of(s)[c] = is_bad ? 0 : 0.25f;
      bad.Of(s)[c] = !is_bad ? 0.25f : random_() % 2 == 0 ? nan : -infinity;
    }
  }
  for (auto* engine : {spoilt.get(), zeroed.get()}) {
    ApplyInput input;
    Rows& rows = engine == spoilt.get() ? bad : good;
    input.stacks.push_back({0, {}, {}, rows.Features<const float>()});
    engine->Apply(*engine->Prepare(batch->view()), input);
  }
  for (int p = 0; p < kShape.partitions; ++p) {
    for (int row = 0; row < kShape.rows_per_partition; ++row) {
      ASSERT_EQ(spoilt->ReadRow(0, p, row, width_), zeroed->ReadRow(0, p, row, width_)) << row;
    }
  }
}

TEST_P(InPlaceTest, GradientsThatLackSamplesAreRefused) {
  const auto engine = MakeEngine();
  const auto batch = *engine->Prepare(MakeBatch()->view());
  Rows rows(width_, width_);
  const auto refused = [&](const auto& spoil) {
    ApplyInput input;
    input.stacks.push_back({0, {}, {}, rows.Features<const float>()});
    spoil(&input.stacks[0]);
    return testing::Check(batch, input).code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(refused([](StackGradients*) {}), absl::StatusCode::kOk);
  EXPECT_EQ(refused([](StackGradients* given) { given->features.pop_back(); }), kInvalid);
  EXPECT_EQ(refused([](StackGradients* given) { given->features[0].samples = 1; }), kInvalid);
  EXPECT_EQ(refused([](StackGradients* given) { given->features[2].first_sample += 40; }),
            kInvalid);
  EXPECT_EQ(refused([](StackGradients* given) { --given->features[0].stride; }), kInvalid);
  EXPECT_EQ(refused([](StackGradients* given) { --given->features[0].width; }), kInvalid);
  const std::vector<float> both(batch->stacks()[0].samples.size() * width_);
  EXPECT_EQ(refused([&](StackGradients* given) { given->gradients = both; }), kInvalid);
}

// A width with a kernel of its own, one of whole vectors, one of half a vector.
INSTANTIATE_TEST_SUITE_P(Widths, InPlaceTest, ::testing::Values(64, 48, 8));

}  // namespace in_place_test
}  // namespace emberd::shard
