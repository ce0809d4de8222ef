#include "client/demo/movielens.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/paths.h"

namespace emberd::demo {
namespace {

using testing::HasSubstr;

// 4 users, 4 items, all 16 pairs rated.
const std::string kTiny = SourcePath("tests/data/movielens");

// Examples of a batch as text, to be compared whatever their order.
std::multiset<std::string> Rows(const Batch& batch) {
  std::multiset<std::string> rows;
  for (int64_t i = 0; i < batch.size; ++i) {
    std::ostringstream row;
    row << batch.labels[i];
    for (const FeatureColumn& feature : batch.features) {
      row << " |";
      for (int32_t id : feature.IdsOf(i)) row << ' ' << id;
    }
    rows.insert(row.str());
  }
  return rows;
}

TEST(MovieLensTest, BuildsVocabulariesFromTheFiles) {
  const auto data = MovieLens::Open(kTiny, 1);
  ASSERT_TRUE(data.ok()) << data.status();
  const auto& features = (*data)->info().features;
  ASSERT_EQ(features.size(), 7u);
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"user", 4},       {"item", 4},   {"age", 3},  {"gender", 2},
      {"occupation", 3}, {"genres", 3}, {"title", 6}};  // ages 20 and 24 share a bucket; "The" and
                                                        // "the" are one word
  for (size_t f = 0; f < expected.size(); ++f) {
    EXPECT_EQ(features[f].name, expected[f].first);
    EXPECT_EQ(features[f].vocabulary_size, expected[f].second) << expected[f].first;
  }
  EXPECT_EQ(features[5].combiner, client::Combiner::kMean);
  EXPECT_EQ(features[6].combiner, client::Combiner::kSqrtn);
}

TEST(MovieLensTest, EveryRatingIsInExactlyOnePart) {
  const auto data = MovieLens::Open(kTiny, 1);
  ASSERT_TRUE(data.ok());
  EXPECT_EQ((*data)->train_size(), 13);
  EXPECT_EQ((*data)->test_size(), 3);
  Batch train, test;
  ASSERT_TRUE((*data)->ReadTrain(0, 13, &train).ok());
  ASSERT_TRUE((*data)->ReadTest(0, 3, &test).ok());
  std::set<std::pair<int, int>> pairs;
  for (const Batch* batch : {&train, &test}) {
    for (int64_t i = 0; i < batch->size; ++i) {
      pairs.insert({batch->features[0].ids[i], batch->features[1].ids[i]});
    }
  }
  EXPECT_EQ(pairs.size(), 16u);
}

TEST(MovieLensTest, JoinsUserAndItemToTheRating) {
  const auto data = MovieLens::Open(kTiny, 1);
  ASSERT_TRUE(data.ok());
  Batch batch;
  ASSERT_TRUE((*data)->ReadTrain(0, 13, &batch).ok());
  int checked = 0;
  for (int64_t i = 0; i < batch.size; ++i) {
    const int user = batch.features[0].ids[i], item = batch.features[1].ids[i];
    const int pair = 4 * user + item;                                   // row of the .inter file
    EXPECT_EQ(batch.labels[i], 1 + (pair * 7) % 5 >= 4 ? 1.0f : 0.0f);  // how the file was made
    if (item == 2) {
      EXPECT_TRUE(batch.features[5].IdsOf(i).empty() && batch.features[6].IdsOf(i).empty());
    } else if (item == 3) {
      EXPECT_EQ(batch.features[5].IdsOf(i).size(), 3u);
      EXPECT_EQ(batch.features[6].IdsOf(i).size(), 4u);
    }
    ++checked;
  }
  EXPECT_EQ(checked, 13);
}

TEST(MovieLensTest, SeedChoosesTheSplit) {
  const auto first = MovieLens::Open(kTiny, 1), same = MovieLens::Open(kTiny, 1);
  ASSERT_TRUE(first.ok() && same.ok());
  Batch a, b;
  ASSERT_TRUE((*first)->ReadTest(0, 3, &a).ok());
  ASSERT_TRUE((*same)->ReadTest(0, 3, &b).ok());
  EXPECT_EQ(Rows(a), Rows(b));
  int different = 0;
  for (uint64_t seed = 2; seed < 8; ++seed) {
    const auto other = MovieLens::Open(kTiny, seed);
    ASSERT_TRUE(other.ok() && (*other)->ReadTest(0, 3, &b).ok());
    different += Rows(a) != Rows(b);
  }
  EXPECT_GE(different, 4);
}

TEST(MovieLensTest, PassesHoldTheSameExamplesInAnotherOrder) {
  const auto data = MovieLens::Open(kTiny, 1);
  ASSERT_TRUE(data.ok());
  Batch first, second, across;
  ASSERT_TRUE((*data)->ReadTrain(0, 13, &first).ok());
  ASSERT_TRUE((*data)->ReadTrain(13, 13, &second).ok());
  EXPECT_EQ(Rows(first), Rows(second));
  EXPECT_NE(first.features[0].ids, second.features[0].ids);
  ASSERT_TRUE((*data)->ReadTrain(11, 4, &across).ok());
  EXPECT_EQ(across.features[1].ids,
            (std::vector<int32_t>{first.features[1].ids[11], first.features[1].ids[12],
                                  second.features[1].ids[0], second.features[1].ids[1]}));
}

struct BadFile {
  std::string name, file, content, message;
};
class BadMovieLensTest : public testing::TestWithParam<BadFile> {};

TEST_P(BadMovieLensTest, IsRefusedWithFileAndLine) {
  const std::string directory = TempPath(GetParam().name);
  std::filesystem::remove_all(directory);
  std::filesystem::copy(kTiny, directory);
  std::ofstream(directory + "/tiny." + GetParam().file, std::ios::trunc) << GetParam().content;
  const auto data = MovieLens::Open(directory, 1);
  ASSERT_FALSE(data.ok());
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(data.status().message()), HasSubstr("tiny." + GetParam().file));
  EXPECT_THAT(std::string(data.status().message()), HasSubstr(GetParam().message));
}

const std::string kRatings = "user_id:token\titem_id:token\trating:float\n";
INSTANTIATE_TEST_SUITE_P(
    Files, BadMovieLensTest,
    testing::Values(
        BadFile{"Empty", "inter", "", "empty"},
        BadFile{"Column", "inter", "user_id:token\titem_id:token\n1\t10\n", "no column rating"},
        BadFile{"User", "inter", kRatings + "1\t10\t3\n5\t10\t4\n", "line 3: user_id 5"},
        BadFile{"Item", "inter", kRatings + "1\t12\t3\n", "line 2: item_id 12"},
        BadFile{"Rating", "inter", kRatings + "1\t10\tgood\n", "\"good\" is not a number"},
        BadFile{"Width", "inter", kRatings + "1\t10\n", "line 2: 2 columns"},
        BadFile{"Age", "user",
                "user_id:token\tage:token\tgender:token\toccupation:token\n1\t-4\tM\tx\n",
                "age is -4"},
        BadFile{
            "Twice", "user",
            "user_id:token\tage:token\tgender:token\toccupation:token\n1\t4\tM\tx\n1\t4\tM\tx\n",
            "line 3: this user_id was there before"}),
    [](const auto& info) { return info.param.name; });

TEST(MovieLensTest, DirectoryWithoutTheFiles) {
  EXPECT_EQ(MovieLens::Open("/no/such/directory", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(MovieLens::Open(SourcePath("client/demo"), 1).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace emberd::demo
