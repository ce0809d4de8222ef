// Would catch any deviation from jax-tpu-embedding in stacking, placement, order, merging, gains,
// limits, cuts, dropping or buffer layout: each file was recorded from that system.
//
// Left out: 070 (optimizers; not a matter of preprocessing), and in the stacking cases the limits
// of stacks, which a callback of the recording program made up. Messages of fatal cases are our
// own.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/paths.h"
#include "tests/golden/golden_json.h"
#include "tests/golden/jax_case.h"

namespace emberd::preprocess {
namespace golden_jax_test {

using nlohmann::json;

constexpr int32_t kPad = 2147483647;

// tests/golden/jax, or another folder with cases of the same form.
std::vector<std::string> CaseFiles() {
  const char* folder = std::getenv("EMBERD_GOLDEN_JAX");
  std::vector<std::string> files;
  const std::string path = folder == nullptr ? SourcePath("tests/golden/jax") : folder;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".json" && entry.path().stem() != "070") {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string NameOf(const testing::TestParamInfo<std::string>& info) {
  return "Case" + std::filesystem::path(info.param).stem().string();
}

class GoldenJaxTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenJaxTest, GivesTheRecordedNumbers) {
  std::ifstream file(GetParam());
  const json test_case = json::parse(file);
  const absl::StatusOr<json> result = RunJaxCase(test_case);
  ASSERT_TRUE(result.ok()) << result.status();
  const json& expected = test_case.at("expected");
  if (expected.contains("fatal")) {
    EXPECT_TRUE(result->contains("fatal")) << result->dump().substr(0, 200);
    return;
  }
  ASSERT_FALSE(result->contains("fatal")) << result->at("fatal");
  std::vector<std::string> ignored;
  if (test_case.at("kind") == "stacking") {
    ignored = {"max_ids_per_partition", "max_unique_ids_per_partition", "table_values",
               "stacked_axes"};
  }
  EXPECT_EQ(FirstDifferenceFrom(expected, *result, ignored), "") << test_case.at("name");
}

// What emberd's servers do: a sample whose weights sum to zero has gains of 0, where JAX divides.
TEST_P(GoldenJaxTest, GivesZeroGainsWhereWeightsSumToZero) {
  std::ifstream file(GetParam());
  const json test_case = json::parse(file);
  json expected = test_case.at("expected");
  int changed = 0;
  if (!expected.contains("hosts")) return;
  for (json& host : expected.at("hosts")) {
    for (json& stack : host.at("stacks")) {
      for (json& device : stack.at("devices")) {
        for (size_t i = 0; i < device.at("gains").size(); ++i) {
          if (!device["gains"][i].is_string() || device["embedding_ids"][i] == kPad) continue;
          device["gains"][i] = 0.0;
          ++changed;
        }
      }
    }
  }
  if (changed == 0) return;
  const absl::StatusOr<json> result = RunJaxCase(test_case, {.divide_by_zero = false});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(FirstDifferenceFrom(expected, *result, {}), "") << test_case.at("name");
}

INSTANTIATE_TEST_SUITE_P(Recorded, GoldenJaxTest, testing::ValuesIn(CaseFiles()), NameOf);

}  // namespace golden_jax_test
}  // namespace emberd::preprocess
