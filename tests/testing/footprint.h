// What a process takes from the system: figures that must not grow while it works.
#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>

#include "base/testing/sanitized.h"

namespace emberd::testing {

struct Footprint {
  int64_t resident_kib = 0;
  int64_t threads = 0;
  int64_t descriptors = 0;
};

// What allocators and lazily made pages may add to a process that has warmed up. A sanitizer keeps
// freed memory for a while.
inline constexpr int64_t kAllowedGrowthKib = kSanitized ? 1024 * 1024 : 32 * 1024;

// All zero if there is no such process.
Footprint FootprintOf(pid_t pid);

// Regions of shared memory that a process has mapped; `name`: of who gives them, see
// server/rpc/local_peers.h.
int RegionsOf(pid_t pid, const std::string& name);

}  // namespace emberd::testing
