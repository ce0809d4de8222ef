#include "base/cpu_pool.h"

#include <memory>
#include <vector>

#include <gtest/gtest.h>

namespace emberd {
namespace {

// Would catch: a task left out or run twice, or a return before all are done, with several callers
// at once.
TEST(WorkerPoolTest, EveryTaskRunsOnce) {
  for (int threads : {1, 2, 5}) {
    CpuPool pool(threads);
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c) {
      callers.emplace_back([&pool] {
        for (int round = 0; round < 200; ++round) {
          std::vector<std::atomic<int>> runs(round % 17);
          pool.ParallelFor(static_cast<int64_t>(runs.size()),
                           [&](int64_t i) { runs[i].fetch_add(1); });
          for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

}  // namespace
}  // namespace emberd
