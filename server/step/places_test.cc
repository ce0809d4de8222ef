// Sums that some shards have written in place must give the activations that returned sums give,
// bit for bit, whichever shards could not write there.
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "config/config.h"
#include "server/step/activations.h"
#include "server/step/request_reader.h"
#include "shard/batch/batch.h"

namespace emberd::step {
namespace places_test {

constexpr int kShards = 4;
constexpr int kSparseCores = 2;  // of each
constexpr int kWidth = 8;
constexpr int64_t kSamples = 50;
// Table p has a row of 5 columns in a stack of 8; u and v share a stack.
constexpr char kModel[] = R"(
  name: "m" optimizer { sgd {} }
  tables { name: "u" vocabulary_size: 64 embedding_dim: 8 combiner: SUM }
  tables { name: "v" vocabulary_size: 64 embedding_dim: 8 combiner: SUM }
  tables { name: "p" vocabulary_size: 64 embedding_dim: 5 combiner: SUM optimizer { momentum { momentum: 0.5 } } }
  features { name: "fv" table: "v" } features { name: "fp" table: "p" } features { name: "fu" table: "u" })";

class PlacesTest : public ::testing::Test {
 protected:
  PlacesTest()
      : random_(TestSeed()),
        model_(*MakeServedModel(*config::ParseModel(kModel),
                                {.shards = kShards, .sparsecores_per_shard = kSparseCores}, nullptr,
                                &metrics_)) {}

  // Each sample has `least` to `most` ids of each feature.
  std::shared_ptr<const preprocess::PreprocessedBatch> MakeBatch(uint64_t least = 0,
                                                                 uint64_t most = 3) {
    std::vector<std::vector<int64_t>> ids(3), splits(3, {0});
    std::vector<preprocess::FeatureInput> inputs(3);
    for (int f = 0; f < 3; ++f) {
      for (int64_t s = 0; s < kSamples; ++s) {
        const uint64_t count = least + random_() % (most - least + 1);
        for (uint64_t i = 0; i < count; ++i) ids[f].push_back(random_() % 64);
        splits[f].push_back(static_cast<int64_t>(ids[f].size()));
      }
      inputs[f].ids =
          preprocess::RaggedInput{absl::MakeConstSpan(splits[f]), absl::MakeConstSpan(ids[f])};
    }
    auto batch = model_->preprocessor->Run(inputs);
    EXPECT_TRUE(batch.ok()) << batch.status();
    return *batch;
  }
  // The samples of a stack that a shard has entries of, as the shard finds them.
  static std::vector<int32_t> SamplesOf(const preprocess::StackBatchView& view) {
    const auto runs = *shard::RunTable::Make(view, kSparseCores);
    std::set<int32_t> samples;
    for (int slot = 0; slot < runs.slots(); ++slot) {
      for (int k = 0; k < runs.partitions(); ++k) {
        const shard::Run& run = runs.at(slot, k, 0);
        for (int64_t i = 0; i < run.size; ++i) {
          for (const preprocess::SampleSpan& span : view.spans[slot]) {
            const int32_t place = run.samples[i] - span.slot_begin;
            if (place >= 0 && place < span.count) samples.insert(span.sample_begin + place);
          }
        }
      }
    }
    return {samples.begin(), samples.end()};
  }

  std::mt19937_64 random_;
  ops::Metrics metrics_{"test"};
  const std::shared_ptr<const ServedModel> model_;
};

TEST_F(PlacesTest, OnlyWholeRowsOfFloatsHavePlaces) {
  const auto batch = MakeBatch();
  const auto output = TakeOutput(*model_, batch->feature_samples(), v1::FLOAT32);
  const auto places = PlacesOfSums(*model_, *batch, v1::FLOAT32, *output);
  ASSERT_EQ(places.size(), 1u) << "that of u and v";
  EXPECT_EQ(places[0].features.size(), 2u);
  for (const auto& rows : places[0].features) {
    EXPECT_EQ(rows.samples, kSamples);
    EXPECT_EQ(rows.width, kWidth);
  }
  EXPECT_TRUE(PlacesOfSums(*model_, *batch, v1::BFLOAT16, *output).empty());
}

TEST_F(PlacesTest, LaterShardsPassOverWhatEarlierOnesHave) {
  const auto batch = MakeBatch();
  for (size_t stack = 0; stack < model_->plan.stacks.size(); ++stack) {
    shard::SumPlaces places;
    std::set<int32_t> earlier;
    for (int shard = 0; shard < kShards; ++shard) {
      const auto views = batch->ShardView(shard);
      PassOver(views[stack], &places);
      for (const int32_t sample : SamplesOf(views[stack])) earlier.insert(sample);
      for (int32_t sample = 0; sample < views[stack].sample_count; ++sample) {
        ASSERT_EQ(places.PassesOver(sample), earlier.contains(sample)) << sample;
      }
      EXPECT_EQ(places.CountPassedOver(), static_cast<int64_t>(earlier.size()));
    }
  }
}

TEST_F(PlacesTest, ActivationsHaveTheSameBits) {
  std::uniform_real_distribution<float> value(-1, 1);
  for (int round = 0; round < 150; ++round) {
    // With one id each, nothing is left to combine; with at most one, only zeros.
    const auto batch = round % 3 == 0   ? MakeBatch()
                       : round % 3 == 1 ? MakeBatch(1, 1)
                                        : MakeBatch(0, 1);
    const bool all_write = random_() % 2 == 0;
    const auto usual = TakeOutput(*model_, batch->feature_samples(), v1::FLOAT32);
    const auto output = TakeOutput(*model_, batch->feature_samples(), v1::FLOAT32);
    std::memset(output->memory.get(), 0x5a, output->layout.bytes);
    auto places = PlacesOfSums(*model_, *batch, v1::FLOAT32, *output);
    std::vector<host::GatherResult> returned(kShards), placed(kShards);
    std::vector<std::unique_ptr<std::vector<float>>> memory;
    std::vector<std::unique_ptr<std::vector<int32_t>>> samples;
    for (int shard = 0; shard < kShards; ++shard) {
      const auto views = batch->ShardView(shard);
      const bool writes = all_write || random_() % 4 > 0;  // others are on another machine
      if (writes) placed[shard].places.stacks = places;
      for (const preprocess::StackBatchView& view : views) {
        samples.push_back(std::make_unique<std::vector<int32_t>>(SamplesOf(view)));
        const auto& here = *samples.back();
        const shard::SumPlaces* const of_stack = placed[shard].places.Find(view.stack);
        memory.push_back(std::make_unique<std::vector<float>>());
        memory.push_back(std::make_unique<std::vector<float>>());
        std::vector<float>&all = *memory[memory.size() - 2], &rest = *memory.back();
        for (const int32_t sample : here) {
          std::vector<float> row(kWidth);
          for (float& x : row) x = value(random_);
          all.insert(all.end(), row.begin(), row.end());
          if (of_stack == nullptr || of_stack->PassesOver(sample)) {
            rest.insert(rest.end(), row.begin(), row.end());
            continue;
          }
          const auto& features = of_stack->features;
          const auto& feature = sample < features[1].first_sample ? features[0] : features[1];
          std::copy(row.begin(), row.end(), feature(sample));
        }
        returned[shard].stacks.push_back({view.stack, here, all, 0});
        placed[shard].stacks.push_back({view.stack, here, rest, 0,
                                        static_cast<int64_t>(rest.size()) / kWidth,
                                        of_stack != nullptr});
      }
      ASSERT_TRUE(CheckGatherResult(placed[shard], *model_, *batch, v1::FLOAT32).ok());
      for (shard::SumPlaces& of_stack : places) PassOver(views[of_stack.stack], &of_stack);
    }
    const auto expected = ActivationsIn(*usual, *model_, *batch, v1::FLOAT32);
    const auto found = ActivationsIn(*output, *model_, *batch, v1::FLOAT32);
    std::vector<int> order(expected.features.size());
    std::iota(order.begin(), order.end(), 0);
    CombineActivations(returned, *model_, *batch, v1::FLOAT32, *usual, order);
    CombineActivations(placed, *model_, *batch, v1::FLOAT32, *output, order);
    for (size_t f = 0; f < expected.features.size(); ++f) {
      ASSERT_EQ(std::memcmp(expected.features[f].bytes.data(), found.features[f].bytes.data(),
                            expected.features[f].bytes.size()),
                0)
          << "round " << round << ", feature " << f;
    }
  }
}

// A shard that says it has written more, or less, than it was to is not believed.
TEST_F(PlacesTest, AnswersWithOtherNumbersOfRowsAreRefused) {
  const auto batch = MakeBatch();
  const auto output = TakeOutput(*model_, batch->feature_samples(), v1::FLOAT32);
  auto places = PlacesOfSums(*model_, *batch, v1::FLOAT32, *output);
  PassOver(batch->ShardView(0)[places[0].stack], &places[0]);
  const auto views = batch->ShardView(1);
  const auto check = [&](int64_t more_rows, bool asked) {
    host::GatherResult result;
    if (asked) result.places.stacks = places;
    std::vector<std::vector<int32_t>> samples;
    const std::vector<float> zeros(2 * kSamples * kWidth + kWidth);
    samples.reserve(views.size());
    for (const preprocess::StackBatchView& view : views) {
      const auto& here = samples.emplace_back(SamplesOf(view));
      const bool in_place = view.stack == places[0].stack;
      int64_t rows = 0;
      for (const int32_t s : here) rows += !in_place || places[0].PassesOver(s) ? 1 : 0;
      if (in_place) rows += more_rows;
      result.stacks.push_back(
          {view.stack, here, absl::MakeConstSpan(zeros).first(rows * kWidth), 0, rows, in_place});
    }
    return CheckGatherResult(result, *model_, *batch, v1::FLOAT32).code();
  };
  EXPECT_EQ(check(0, true), absl::StatusCode::kOk);
  EXPECT_EQ(check(1, true), absl::StatusCode::kInternal);
  EXPECT_EQ(check(-1, true), absl::StatusCode::kInternal);
  EXPECT_EQ(check(0, false), absl::StatusCode::kInternal) << "nobody asked for it";
}

}  // namespace places_test
}  // namespace emberd::step
