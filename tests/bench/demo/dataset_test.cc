#include "tests/bench/demo/dataset.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/testing/paths.h"
#include "tests/bench/demo/click_log.h"

namespace emberd::demo {
namespace dataset_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Write(const std::string& name, const std::string& content) {
  const std::string path = TempPath(name);
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

TEST(TextLinesTest, ReadsAnyRange) {
  std::string content;
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&content, "line ", i, "\n");
  const auto lines = TextLines::Open(Write("thousand", content));
  ASSERT_TRUE(lines.ok()) << lines.status();
  EXPECT_EQ((*lines)->size(), 1000);
  for (int64_t first : {0, 1, 63, 64, 65, 127, 500, 999}) {
    const auto read = (*lines)->Read(first, 1);
    ASSERT_EQ(read.size(), 1u);
    EXPECT_EQ(read[0], absl::StrCat("line ", first));
  }
  EXPECT_THAT((*lines)->Read(998, 10), ElementsAre("line 998", "line 999"));
  EXPECT_TRUE((*lines)->Read(1000, 1).empty());
}

TEST(TextLinesTest, EndsOfLinesAndOfTheFile) {
  const auto lines = TextLines::Open(Write("ends", "a\r\n\nb\tc\nlast"));
  ASSERT_TRUE(lines.ok());
  EXPECT_THAT((*lines)->Read(0, 9), ElementsAre("a", "", "b\tc", "last"));
}

TEST(TextLinesTest, EmptyFile) {
  const auto lines = TextLines::Open(Write("empty", ""));
  ASSERT_TRUE(lines.ok());
  EXPECT_EQ((*lines)->size(), 0);
}

TEST(TextLinesTest, ErrorsNameThePath) {
  EXPECT_EQ(TextLines::Open("/no/such/file").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(TextLines::Open("/no/such/file").status().message()),
              testing::HasSubstr("/no/such/file"));
  EXPECT_FALSE(TextLines::Open(testing::TempDir()).ok());
}

TEST(SplitFieldsTest, KeepsEmptyFields) {
  EXPECT_THAT(SplitFields("a\t\tb\t", '\t'), ElementsAre("a", "", "b", ""));
  EXPECT_THAT(SplitFields("", ','), ElementsAre(""));
}

std::string Write(const std::string& name, const std::vector<std::string>& lines) {
  const std::string path = TempPath(name);
  std::ofstream(path, std::ios::binary) << absl::StrJoin(lines, "\n") << "\n";
  return path;
}

std::string Line(const std::string& label, const std::string& number, const std::string& token) {
  std::string line = label;
  for (int i = 0; i < kCriteoNumbers; ++i) absl::StrAppend(&line, "\t", number);
  for (int i = 0; i < kCriteoColumns; ++i) absl::StrAppend(&line, "\t", token);
  return line;
}

TEST(CriteoTest, WrittenLogReadsBack) {
  const ClickLog log(1, 1000, 0);
  const std::string path = TempPath("click.tsv");
  ASSERT_TRUE(WriteCriteoFile(log, 1000, path).ok());
  const auto file = OpenCriteoFile(path, 0, 1'000'000);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->train_size(), 900);
  EXPECT_EQ((*file)->test_size(), 100);

  Batch read, made;
  ASSERT_TRUE((*file)->ReadTrain(300, 200, &read).ok());
  ASSERT_TRUE(log.ReadTrain(300, 200, &made).ok());
  EXPECT_EQ(read.labels, made.labels);
  for (int f = 0; f < kCriteoColumns; ++f) {
    for (int64_t i = 0; i < 200; ++i) {
      const auto ids = made.features[f].IdsOf(i), hashed = read.features[f].IdsOf(i);
      ASSERT_EQ(hashed.size(), ids.size());
      for (size_t k = 0; k < ids.size(); ++k) {
        EXPECT_EQ(hashed[k],
                  TokenId(ClickLog::Token(f, ids[k]), (*file)->info().features[f].vocabulary_size));
      }
    }
  }
  // The held-out part is the end of the file.
  ASSERT_TRUE((*file)->ReadTest(0, 100, &read).ok());
  ASSERT_TRUE(log.ReadTrain(900, 100, &made).ok());
  EXPECT_EQ(read.labels, made.labels);
}

TEST(CriteoTest, NumbersAreStandardizedAndMissingOnesAreZero) {
  std::vector<std::string> lines;
  for (int i = 0; i < 10; ++i) lines.push_back(Line("0", i % 2 == 0 ? "0" : "7", "68fd1e64"));
  for (int i = 0; i < 5; ++i) lines.push_back(Line("1", "", ""));
  lines.push_back(Line("1", "-2", "68fd1e64"));
  const auto file = OpenCriteoFile(Write("numbers.tsv", lines), 0, 1);
  ASSERT_TRUE(file.ok()) << file.status();
  Batch batch;
  ASSERT_TRUE((*file)->ReadTrain(0, 15, &batch).ok());
  EXPECT_FLOAT_EQ(batch.numeric[0], -1.0f);
  EXPECT_FLOAT_EQ(batch.numeric[kCriteoNumbers], 1.0f);
  EXPECT_EQ(batch.numeric[10 * kCriteoNumbers], 0.0f);
  EXPECT_TRUE(batch.features[0].IdsOf(10).empty());
  EXPECT_EQ(batch.labels[10], 1.0f);
  ASSERT_TRUE((*file)->ReadTest(0, 1, &batch).ok());
  EXPECT_FLOAT_EQ(batch.numeric[0], -1.0f) << "negative numbers count as 0";
}

// The ids of a trained model are lost if this ever changes.
TEST(CriteoTest, TokenIdsAreStable) {
  EXPECT_EQ(TokenId("68fd1e64", 1'000'000), TokenId(std::string("68fd") + "1e64", 1'000'000));
  EXPECT_EQ(TokenId("68fd1e64", 1'000'000), 229657);
  EXPECT_EQ(TokenId("", 1'000'000), 26203);
}

TEST(CriteoTest, PassesRepeat) {
  std::vector<std::string> lines;
  for (int i = 0; i < 20; ++i) lines.push_back(Line(i % 3 == 0 ? "1" : "0", "1", "a"));
  const auto file = OpenCriteoFile(Write("passes.tsv", lines), 7, 2);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->train_size(), 7);
  Batch batch, again;
  ASSERT_TRUE((*file)->ReadTrain(5, 4, &batch).ok());
  EXPECT_EQ(batch.labels, (std::vector<float>{0, 1, 1, 0}));  // lines 5, 6, 0, 1
  ASSERT_TRUE((*file)->ReadTrain(12, 4, &again).ok());
  EXPECT_EQ(again.labels, batch.labels);
}

struct BadLine {
  std::string name, line, message;
};
class BadCriteoTest : public testing::TestWithParam<BadLine> {};

TEST_P(BadCriteoTest, IsRefusedWithItsLine) {
  std::vector<std::string> lines(20, Line("0", "1", "a"));
  lines[4] = GetParam().line;
  const auto file = OpenCriteoFile(Write("bad.tsv", lines), 0, 2);
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("line 5"));
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Lines, BadCriteoTest,
    testing::Values(BadLine{"Columns", "0\t1\t2", "3 columns"}, BadLine{"Empty", "", "1 columns"},
                    BadLine{"Label", Line("2", "1", "a"), "label \"2\""},
                    BadLine{"Number", Line("0", "1x", "a"), "\"1x\" is not an integer"}),
    [](const auto& info) { return info.param.name; });

TEST(CriteoTest, TooShortOrNotThere) {
  EXPECT_EQ(OpenCriteoFile(Write("short.tsv", {Line("0", "1", "a")}), 0, 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenCriteoFile("/no/such.tsv", 0, 5).status().code(), absl::StatusCode::kNotFound);
}

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
  const auto data = OpenMovieLens(kTiny, 1);
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
  const auto data = OpenMovieLens(kTiny, 1);
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
  const auto data = OpenMovieLens(kTiny, 1);
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
  const auto first = OpenMovieLens(kTiny, 1), same = OpenMovieLens(kTiny, 1);
  ASSERT_TRUE(first.ok() && same.ok());
  Batch a, b;
  ASSERT_TRUE((*first)->ReadTest(0, 3, &a).ok());
  ASSERT_TRUE((*same)->ReadTest(0, 3, &b).ok());
  EXPECT_EQ(Rows(a), Rows(b));
  int different = 0;
  for (uint64_t seed = 2; seed < 8; ++seed) {
    const auto other = OpenMovieLens(kTiny, seed);
    ASSERT_TRUE(other.ok() && (*other)->ReadTest(0, 3, &b).ok());
    different += Rows(a) != Rows(b);
  }
  EXPECT_GE(different, 4);
}

TEST(MovieLensTest, PassesHoldTheSameExamplesInAnotherOrder) {
  const auto data = OpenMovieLens(kTiny, 1);
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
  const auto data = OpenMovieLens(directory, 1);
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
  EXPECT_EQ(OpenMovieLens("/no/such/directory", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenMovieLens(SourcePath("tests/bench/demo"), 1).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace dataset_test
}  // namespace emberd::demo
