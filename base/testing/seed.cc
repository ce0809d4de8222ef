#include "base/testing/seed.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace emberd {

uint64_t TestSeed(std::optional<uint64_t> usual) {
  const char* given = std::getenv("EMBERD_TEST_SEED");
  const uint64_t seed = given != nullptr    ? std::strtoull(given, nullptr, 10)
                        : usual.has_value() ? *usual
                                            : std::random_device()();
  std::printf("EMBERD_TEST_SEED=%" PRIu64 "\n", seed);
  std::fflush(stdout);
  return seed;
}

}  // namespace emberd
