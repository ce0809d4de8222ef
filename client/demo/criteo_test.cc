#include "client/demo/criteo.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/testing/paths.h"

namespace emberd::demo {
namespace {

using testing::HasSubstr;

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
  const auto file = CriteoFile::Open(path, 0, 1'000'000);
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
  const auto file = CriteoFile::Open(Write("numbers.tsv", lines), 0, 1);
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
  const auto file = CriteoFile::Open(Write("passes.tsv", lines), 7, 2);
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
  const auto file = CriteoFile::Open(Write("bad.tsv", lines), 0, 2);
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
  EXPECT_EQ(CriteoFile::Open(Write("short.tsv", {Line("0", "1", "a")}), 0, 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CriteoFile::Open("/no/such.tsv", 0, 5).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace emberd::demo
