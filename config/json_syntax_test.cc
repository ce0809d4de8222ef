#include "config/json_syntax.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::config {
namespace {

std::string SyntaxErrorOf(absl::string_view json) {
  return std::string(CheckJsonSyntax(json).message());
}

TEST(CheckJsonSyntax, AcceptsJson) {
  for (const char* good : {"{}", R"({"a": 1, "b": [1, 2.5, "x", true, {"a": null}], "c": []})",
                           R"([{"a": 1}, {"a": 1}])", "  1  "}) {
    EXPECT_TRUE(CheckJsonSyntax(good).ok()) << good << ": " << SyntaxErrorOf(good);
  }
}

TEST(CheckJsonSyntax, GivesLineAndColumnOfBadSyntax) {
  EXPECT_THAT(SyntaxErrorOf("{\n  \"a\": ]\n}"),
              testing::StartsWith("JSON parse error at line 2, column 8"));
  for (const char* bad : {"", "{", "{\"a\"}", "{\"a\": 1,}", "{'a': 1}", "{\"a\": 1} x", "[1 2]",
                          "\"\377\"", "{\"a\": nan}", "\0"}) {
    EXPECT_FALSE(CheckJsonSyntax(bad).ok()) << bad;
  }
}

TEST(CheckJsonSyntax, RefusesAFieldTwice) {
  EXPECT_EQ(SyntaxErrorOf(R"({"a": 1, "b": 2, "a": 3})"), "a: is given more than once");
  EXPECT_EQ(SyntaxErrorOf(R"({"t": [{}, {"x": {"b": 1, "b": 1}}]})"),
            "t[1].x.b: is given more than once");
  EXPECT_EQ(SyntaxErrorOf(R"({"batch_size": 1, "batchSize": 1})"),
            "batchSize: is given more than once");
}

// Protobuf would drop the null and flatten the list.
TEST(CheckJsonSyntax, RefusesNullsAndListsInLists) {
  EXPECT_EQ(SyntaxErrorOf(R"({"t": [1, null]})"), "t[1]: is null, which may not stand in a list");
  EXPECT_EQ(SyntaxErrorOf(R"({"t": [[1]]})"), "t[0]: is a list, which may not stand in a list");
}

TEST(CheckJsonSyntax, DeepNestingDoesNotExhaustTheStack) {
  std::string deep;
  for (int i = 0; i < 200000; ++i) deep += "{\"a\":";
  EXPECT_FALSE(CheckJsonSyntax(deep).ok());
}

}  // namespace
}  // namespace emberd::config
