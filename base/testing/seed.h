// The seed of a random test.
#pragma once

#include <cstdint>
#include <optional>

namespace emberd {

// EMBERD_TEST_SEED where it is set, else `usual`, else one that differs in every run. Printed, so
// that a failure can be repeated.
uint64_t TestSeed(std::optional<uint64_t> usual = std::nullopt);

}  // namespace emberd
