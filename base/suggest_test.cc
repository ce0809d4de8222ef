#include "base/suggest.h"

#include <gtest/gtest.h>

namespace emberd {
namespace suggest_test {

const std::vector<std::string> kFields = {"name", "vocabulary_size", "embedding_dim", "combiner"};

TEST(NearestName, FindsMisspeltNames) {
  EXPECT_EQ(NearestName("vocab", kFields), "vocabulary_size");
  EXPECT_EQ(NearestName("vocabulary_szie", kFields), "vocabulary_size");
  EXPECT_EQ(NearestName("Combiner", kFields), "combiner");
  EXPECT_EQ(NearestName("nam", kFields), "name");
  EXPECT_EQ(NearestName("optimizer", kFields), "");
  EXPECT_EQ(NearestName("", kFields), "");
  EXPECT_EQ(NearestName("x", {"t", "u"}), "t");  // one letter for another
}

TEST(KnownNames, ListsAndAsks) {
  EXPECT_EQ(KnownNames("fields", "nmae", {"name", "dim"}),
            "did you mean \"name\"? Known fields: name, dim");
  EXPECT_EQ(KnownNames("fields", "learning_rate", {"name", "dim"}), "known fields: name, dim");
  EXPECT_EQ(KnownNames("tables", "t", {}), "there are no tables");
  const std::string cut = KnownNames("rows", "zzz", std::vector<std::string>(42, "r"));
  EXPECT_EQ(cut.substr(cut.size() - 17), ", r, r and 2 more");
}

}  // namespace suggest_test
}  // namespace emberd
