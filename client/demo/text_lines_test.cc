#include "client/demo/text_lines.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"

namespace emberd::demo {
namespace {

using testing::ElementsAre;

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

}  // namespace
}  // namespace emberd::demo
