// The two kinds of threads of a process. Made once, near main, and handed down to all who need
// them: their number does not grow with models, shards or clients.
#pragma once

#include "base/blocking_pool.h"
#include "base/cpu_pool.h"

namespace emberd {

struct ThreadPools {
  explicit ThreadPools(int cpu_threads) : cpu(cpu_threads) {}

  CpuPool cpu;            // for what computes
  BlockingPool blocking;  // for what waits
};

}  // namespace emberd
