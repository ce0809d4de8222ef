// Gradients that are summed by row before they are sent. Catches: sums where they are more bytes
// than what they are made of, sums that hide a gradient from the shard's own judgement (a sum that
// is not finite), a sample's gradient in another row's sum, and rows without a gradient that hold
// what was in memory before. That the tables get the same bits is in unique_rows_test.cc.
#include "server/step/gradients.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "server/step/activations.h"

namespace emberd::step {
namespace gradients_test {

using testing::ElementsAre;

constexpr int kDim = 2, kWidth = 8;

class RowGradientsTest : public testing::Test {
 protected:
  RowGradientsTest()
      : model_(*MakeServedModel(
            *config::ParseModel(
                "name: 'm' tables { name: 'a' vocabulary_size: 40 embedding_dim: 2 }"
                "features { name: 'f' table: 'a' } features { name: 'g' table: 'a' }"),
            {.shards = 1, .sparsecores_per_shard = 1}, nullptr, &metrics_)) {}

  // A batch of one id for each sample; `rows`: that the shard answers with, or with sums if 0.
  KeptBatch Keep(const std::vector<int64_t>& f, const std::vector<int64_t>& g, int64_t rows) {
    std::vector<preprocess::FeatureInput> inputs(2);
    inputs[0].ids =
        preprocess::DenseInput{absl::MakeConstSpan(f), 1, static_cast<int64_t>(f.size())};
    inputs[1].ids =
        preprocess::DenseInput{absl::MakeConstSpan(g), 1, static_cast<int64_t>(g.size())};
    const auto batch = *model_->preprocessor->Run(inputs);
    host::GatherResult result;
    std::vector<int32_t> samples(f.size() + g.size());
    for (size_t i = 0; i < samples.size(); ++i) samples[i] = static_cast<int32_t>(i);
    const std::vector<float> sums(samples.size() * kWidth);
    if (rows == 0) {
      result.stacks.push_back({0, samples, sums, 0});
    } else {
      result.rows.push_back(
          {0, kWidth * 4, absl::MakeConstSpan(bytes_).first(rows * kWidth * 4), 0});
      EXPECT_TRUE(ArrangeUniqueRows(*model_, *batch, 0, pool_, cpu_, &result).ok());
    }
    return KeptBatch(model_, *batch, {&result, 1});
  }
  static GradientInput Input(const std::vector<float>* f, const std::vector<float>* g) {
    GradientInput input;
    input.hyperparameters.resize(1);
    for (const std::vector<float>* values : {f, g}) {
      FeatureGradientView& view = input.features.emplace_back();
      if (values == nullptr) continue;
      view.data = reinterpret_cast<const char*>(values->data());
    }
    return input;
  }
  static std::optional<ShardGradients> Sum(const GradientInput& input, const KeptBatch& batch) {
    return SumsForShard(input, batch, /*shard=*/0);
  }
  // The live columns of a row of the sums.
  static std::vector<float> Row(const ShardGradients& sums, int row) {
    const auto all = sums.input.stacks[0].gradients.subspan(row * kWidth, kWidth);
    for (int c = kDim; c < kWidth; ++c) EXPECT_EQ(all[c], 0.0f);
    return {all.begin(), all.begin() + kDim};
  }

  ops::Metrics metrics_{"test"};
  const std::vector<char> bytes_ = std::vector<char>(1000);
  const std::shared_ptr<const ServedModel> model_;
  CpuPool cpu_{1};
  BufferPool pool_;
};

TEST_F(RowGradientsTest, EachRowGetsTheSumOverAllFeatures) {
  const KeptBatch batch = Keep({3, 7, 3}, {7, 9}, 3);
  const std::vector<float> f = {1, 2, 10, 20, 100, 200}, g = {0.5, 0.25, 4, 8};
  const auto sums = Sum(Input(&f, &g), batch);
  ASSERT_TRUE(sums.has_value());
  EXPECT_TRUE(sums->input.stacks[0].of_rows);
  ASSERT_EQ(sums->input.stacks[0].gradients.size(), 3u * kWidth);
  EXPECT_THAT(Row(*sums, 0), ElementsAre(101, 202));
  EXPECT_THAT(Row(*sums, 1), ElementsAre(10.5, 20.25));
  EXPECT_THAT(Row(*sums, 2), ElementsAre(4, 8));
}

TEST_F(RowGradientsTest, AFeatureWithoutGradientsCountsAsZero) {
  const KeptBatch batch = Keep({3, 3, 3}, {7, 9}, 3);
  const std::vector<float> f = {1, 2, 10, 20, 100, 200};
  const auto sums = Sum(Input(&f, nullptr), batch);
  ASSERT_TRUE(sums.has_value());
  EXPECT_THAT(Row(*sums, 0), ElementsAre(111, 222));
  EXPECT_THAT(Row(*sums, 1), ElementsAre(0, 0));
  EXPECT_THAT(Row(*sums, 2), ElementsAre(0, 0));
}

TEST_F(RowGradientsTest, WhatWouldNotBeLessIsNotSummed) {
  const std::vector<float> f = {1, 2, 10, 20, 100, 200}, g = {0.5, 0.25, 4, 8};
  EXPECT_FALSE(Sum(Input(&f, &g), Keep({1, 2, 3}, {4, 5}, 5)).has_value());
  // The shard does not know the distinct rows of a batch that it answered with sums.
  EXPECT_FALSE(Sum(Input(&f, &g), Keep({3, 3, 3}, {3, 3}, 0)).has_value());
  // All gradients are zero, which takes no bytes at all.
  EXPECT_FALSE(Sum(Input(nullptr, nullptr), Keep({3, 3, 3}, {3, 3}, 1)).has_value());
}

// Two stacks, of which one gets no gradients, or is not summed.
TEST_F(RowGradientsTest, StacksDoNotStandInEachOthersWay) {
  const std::shared_ptr<const ServedModel> model = *MakeServedModel(
      *config::ParseModel("name: 'm' tables { name: 'a' vocabulary_size: 40 embedding_dim: 8 }"
                          "tables { name: 'b' vocabulary_size: 40 embedding_dim: 16 }"
                          "features { name: 'f' table: 'a' } features { name: 'g' table: 'b' }"),
      {.shards = 1, .sparsecores_per_shard = 1}, nullptr, &metrics_);
  ASSERT_EQ(model->plan.stacks.size(), 2u);
  const int first = model->plan.stacks[0].features[0].feature, second = 1 - first;
  const std::vector<int64_t> ids = {3, 3, 3, 5};
  std::vector<preprocess::FeatureInput> inputs(2);
  for (auto& input : inputs) input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 4};
  const auto batch = *model->preprocessor->Run(inputs);
  const std::vector<int32_t> samples = {0, 1, 2, 3};
  const std::vector<float> values(4 * 16, 0.5f);
  for (const bool first_is_summed : {true, false}) {
    host::GatherResult result;
    for (int k = 0; k < 2; ++k) {
      const int width = model->plan.stacks[k].embedding_dim;
      if (k == 0 && !first_is_summed) {
        result.stacks.push_back({0, samples, absl::MakeConstSpan(values).first(4 * width), 0});
      } else {
        result.rows.push_back({k, width * 4, absl::MakeConstSpan(bytes_).first(2 * width * 4), 0});
      }
    }
    ASSERT_TRUE(ArrangeUniqueRows(*model, *batch, 0, pool_, cpu_, &result).ok());
    const KeptBatch kept(model, *batch, {&result, 1});
    for (const bool first_is_given : {true, false}) {
      GradientInput input;
      input.hyperparameters.resize(2);
      input.features.resize(2);
      const auto* const data = reinterpret_cast<const char*>(values.data());
      if (first_is_given) input.features[first].data = data;
      input.features[second].data = data;
      const auto sent = Sum(input, kept);
      ASSERT_TRUE(sent.has_value());
      const auto& of_first = sent->input.stacks[0];
      const size_t width = model->plan.stacks[0].embedding_dim;
      EXPECT_EQ(of_first.gradients.size(),
                first_is_given ? (first_is_summed ? 2 : 4) * width : size_t{0});
      EXPECT_EQ(of_first.of_rows, first_is_given && first_is_summed);
      const auto& of_second = sent->input.stacks[1];
      EXPECT_TRUE(of_second.of_rows);
      std::vector<float> expected(model->plan.stacks[1].embedding_dim, 1.5f);
      expected.resize(2 * expected.size(), 0.5f);
      EXPECT_THAT(of_second.gradients, testing::ElementsAreArray(expected));
    }
  }
}

TEST_F(RowGradientsTest, SumsThatAreNotFiniteAreLeftToTheShard) {
  const KeptBatch batch = Keep({3, 3, 3}, {3, 3}, 1);
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> f = {0, most, 0, 0, 0, most}, g = {0, 0, 0, 0};
  EXPECT_FALSE(Sum(Input(&f, &g), batch).has_value());
  const std::vector<float> bad = {0, 0, std::nanf(""), 0};
  EXPECT_FALSE(Sum(Input(nullptr, &bad), batch).has_value());
}

}  // namespace gradients_test
}  // namespace emberd::step
