// Would catch: bad input that gets through to code which trusts it, and messages that do not say
// where it was bad.
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "preprocess/batch/sort_and_merge.h"

namespace emberd::preprocess {
namespace feature_input_test {

using testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

FeatureInput Dense(const Longs& ids, int64_t per_sample, int64_t samples) {
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), per_sample, samples};
  return input;
}
FeatureInput Sparse(const Longs& indices, const Longs& ids, int64_t samples) {
  FeatureInput input;
  input.ids = SparseInput{absl::MakeConstSpan(indices), absl::MakeConstSpan(ids), samples};
  return input;
}
FeatureInput Ragged(const Longs& splits, const Longs& ids) {
  FeatureInput input;
  input.ids = RaggedInput{absl::MakeConstSpan(splits), absl::MakeConstSpan(ids)};
  return input;
}

void ExpectRefused(const FeatureInput& input, absl::StatusCode code, const std::string& text) {
  const absl::Status status = ValidateFeature("query", 10, input);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("feature 'query'"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kRange = absl::StatusCode::kOutOfRange;

TEST(ValidateTest, AcceptsWhatIsFine) {
  const Longs none, ids = {0, 9, 3, 3}, splits = {0, 0, 4}, indices = {0, 0, 0, 1, 2, 0, 2, 7};
  EXPECT_TRUE(ValidateFeature("f", 10, Dense(ids, 2, 2)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Dense(none, 3, 0)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Dense(none, 0, 5)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Ragged(splits, ids)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Ragged({0}, none)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Sparse(indices, ids, 3)).ok());
  EXPECT_TRUE(ValidateFeature("f", 10, Sparse(none, none, 3)).ok());
}

TEST(ValidateTest, RefusesSizesThatDoNotFit) {
  const Longs ids = {1, 2, 3}, none;
  ExpectRefused(Dense(ids, 2, 2), kInvalid, "3 ids");
  ExpectRefused(Dense(ids, 1, -1), kInvalid, "sample_count is -1");
  ExpectRefused(Dense(ids, -3, 1), kInvalid, "ids_per_sample is -3");
  ExpectRefused(Dense(ids, 3, 0), kInvalid, "3 ids");
  ExpectRefused(Dense(none, int64_t{1} << 40, int64_t{1} << 24), kInvalid, "0 ids");
  ExpectRefused(Dense(none, 1, int64_t{1} << 40), kInvalid, "sample_count is 1099511627776");
  ExpectRefused(Sparse({0, 0, 1}, ids, 3), kInvalid, "3 numbers");
  ExpectRefused(Sparse({0, 0}, ids, 3), kInvalid, "2 numbers");
  ExpectRefused(Ragged(none, ids), kInvalid, "row_splits is empty");
  ExpectRefused(Ragged({0, 2}, ids), kInvalid, "position 1 is 2; allowed: 3");
}

TEST(ValidateTest, RefusesSamplesOutOfOrderOrRange) {
  const Longs ids = {1, 2, 3};
  ExpectRefused(Ragged({1, 3}, ids), kInvalid, "position 0 is 1; allowed: 0");
  ExpectRefused(Ragged({0, 2, 1, 3}, ids), kInvalid, "position 2 is 1; allowed: >= 2");
  const Longs decreasing = {1, 0, 0, 0, 2, 0}, beyond = {0, 0, 1, 0, 3, 0},
              negative = {-1, 0, 0, 0, 0, 0};
  ExpectRefused(Sparse(decreasing, ids, 3), kInvalid, "position 1 has sample 0; allowed: >= 1");
  ExpectRefused(Sparse(beyond, ids, 3), kRange, "position 2 has sample 3; allowed: [0, 3)");
  ExpectRefused(Sparse(negative, ids, 3), kRange, "position 0 has sample -1");
}

TEST(ValidateTest, RefusesIdsBeyondTheVocabulary) {
  ExpectRefused(Dense({1, 10}, 1, 2), kRange, "id at position 1 is 10; allowed: [0, 10)");
  ExpectRefused(Dense({-1, 1}, 1, 2), kRange, "id at position 0 is -1");
  ExpectRefused(Dense({1, int64_t{1} << 32}, 1, 2), kRange, "4294967296");
  ExpectRefused(Dense({std::numeric_limits<int64_t>::min()}, 1, 1), kRange, "position 0");
  const Ints narrow = {3, -7};
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(narrow), 1, 2};
  ExpectRefused(input, kRange, "id at position 1 is -7");
  // A vocabulary beyond 32 bits takes every 32-bit id that is not negative.
  const Ints largest = {std::numeric_limits<int32_t>::max()};
  input.ids = DenseInput{absl::MakeConstSpan(largest), 1, 1};
  EXPECT_TRUE(ValidateFeature("f", int64_t{1} << 40, input).ok());
  EXPECT_FALSE(ValidateFeature("f", std::numeric_limits<int32_t>::max(), input).ok());
}

TEST(ValidateTest, RefusesBadWeights) {
  const Longs ids = {1, 2, 3};
  FeatureInput input = Dense(ids, 3, 1);
  input.has_weights = true;
  for (const std::vector<float>& weights : {std::vector<float>{}, {1, 2}, {1, 2, 3, 4}}) {
    input.weights = weights;
    ExpectRefused(input, kInvalid, "one per id, or a single one");
  }
  const std::vector<float> nan = {1, std::numeric_limits<float>::quiet_NaN(), 1};
  input.weights = nan;
  ExpectRefused(input, kInvalid, "weight at position 1 is nan");
  const std::vector<float> infinite = {-std::numeric_limits<float>::infinity()};
  input.weights = infinite;
  ExpectRefused(input, kInvalid, "weight at position 0 is -inf");
}

TEST(FeatureInputTest, RoughSizeIsOfIdsOrSamples) {
  EXPECT_EQ(RoughSize(Dense({1, 2, 3, 4}, 2, 2)), 4);
  EXPECT_EQ(RoughSize(Dense({}, 0, 70)), 70);
  EXPECT_EQ(RoughSize(Sparse({0, 0}, {7}, 5)), 5);
  EXPECT_EQ(RoughSize(Ragged({0, 1, 1, 1}, {7})), 4);
  EXPECT_EQ(RoughSize(Ragged({0, 3}, {7, 8, 9})), 3);
  EXPECT_EQ(RoughSize(Dense({}, 0, -1)), 0);  // not checked yet
}

TEST(FeatureInputTest, SingleIdsHaveNoOthersBesideThemAndNoWeight) {
  EXPECT_TRUE(HasSingleIds(Dense({1, 2, 3}, 1, 3)));
  EXPECT_TRUE(HasSingleIds(Dense({}, 0, 3)));
  EXPECT_FALSE(HasSingleIds(Dense({1, 1}, 2, 1)));
  EXPECT_TRUE(HasSingleIds(Ragged({0, 1, 1, 2}, {7, 8})));
  EXPECT_TRUE(HasSingleIds(Ragged({0}, {})));
  EXPECT_FALSE(HasSingleIds(Ragged({0, 1, 3}, {7, 8, 9})));
  EXPECT_TRUE(HasSingleIds(Sparse({0, 0, 2, 5}, {7, 8}, 5)));
  EXPECT_TRUE(HasSingleIds(Sparse({}, {}, 5)));
  EXPECT_FALSE(HasSingleIds(Sparse({0, 0, 2, 0, 2, 1}, {7, 8, 9}, 5)));
  FeatureInput input = Dense({1, 2}, 1, 2);
  input.has_weights = true;
  const std::vector<float> one = {1}, ones = {1, 1}, two = {1, 2};
  for (const auto& [weights, single] :
       {std::pair(&one, true), std::pair(&ones, true), std::pair(&two, false)}) {
    input.weights = *weights;
    EXPECT_EQ(HasSingleIds(input), single);
  }
}

}  // namespace feature_input_test
}  // namespace emberd::preprocess
