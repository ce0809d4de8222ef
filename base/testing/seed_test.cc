#include "base/testing/seed.h"

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

namespace emberd {
namespace seed_test {

TEST(SeedTest, TheEnvironmentGoesBeforeTheUsualOne) {
  const char* const given = std::getenv("EMBERD_TEST_SEED");
  const std::string before = given == nullptr ? "" : given;
  unsetenv("EMBERD_TEST_SEED");
  EXPECT_EQ(TestSeed(17), 17u);
  EXPECT_NE(TestSeed(), TestSeed());
  setenv("EMBERD_TEST_SEED", "18446744073709551615", 1);
  EXPECT_EQ(TestSeed(17), ~uint64_t{0});
  unsetenv("EMBERD_TEST_SEED");
  if (given != nullptr) setenv("EMBERD_TEST_SEED", before.c_str(), 1);
}

}  // namespace seed_test
}  // namespace emberd
