// Would catch: a hand-written case that crashes the program that explains it.
#include "tests/golden/jax_case.h"

#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "base/testing/paths.h"
#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace jax_case_test {

using nlohmann::json;

json Load(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/jax/" + name));
  return json::parse(file);
}

// A random node of the tree, other than the root.
json* Pick(Random& random, json* node) {
  while (node->is_structured() && !node->empty()) {
    const auto steps = static_cast<int64_t>(random() % node->size());
    node = &*std::next(node->begin(), steps);
    if (random() % 4 == 0) break;
  }
  return node;
}

TEST(JaxCaseTest, DamagedCasesAreErrorsOrResults) {
  Random random(TestSeed(1));
  const json values = {nullptr,
                       -1,
                       0,
                       1,
                       3,
                       64,
                       2147483647,
                       -900000000,
                       1099511627776,
                       0.5,
                       "",
                       "sum",
                       json::array(),
                       json::object()};
  for (const char* name :
       {"012.json", "028.json", "034.json", "052.json", "061.json", "062.json"}) {
    const json whole = Load(name);
    for (int n = 0; n < 150; ++n) {
      json damaged = whole;
      *Pick(random, &damaged.at("input")) = values[random() % values.size()];
      const absl::StatusOr<json> result = RunJaxCase(damaged);
      EXPECT_TRUE(result.ok() || !result.status().message().empty());
    }
  }
}

TEST(JaxCaseTest, UnknownKindsAreRefused) {
  EXPECT_FALSE(RunJaxCase(json::object()).ok());
  EXPECT_FALSE(RunJaxCase({{"kind", "optimizer"}, {"input", json::object()}}).ok());
}

}  // namespace jax_case_test
}  // namespace emberd::preprocess
