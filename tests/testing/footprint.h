// What a process takes from the system: figures that must not grow while it works.
#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>

namespace emberd::testing {

struct Footprint {
  int64_t resident_kib = 0;
  int64_t threads = 0;
  int64_t descriptors = 0;
};

// What allocators and lazily made pages may add to a process that has warmed up. A sanitizer keeps
// freed memory for a while.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int64_t kAllowedGrowthKib = 1024 * 1024;
#else
inline constexpr int64_t kAllowedGrowthKib = 32 * 1024;
#endif

// All zero if there is no such process.
Footprint FootprintOf(pid_t pid);

// Regions of shared memory that a process has mapped; `name`: of who gives them, see
// server/rpc/local_peers.h.
int RegionsOf(pid_t pid, const std::string& name);

}  // namespace emberd::testing
