#include "server/rpc/memory_budget.h"

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace emberd::rpc {
namespace memory_budget_test {

TEST(MemoryBudgetTest, RefusesWithTheFigures) {
  const MemoryBudget budget(100, "budgets.in_flight_bytes");
  std::optional<MemoryRoom> room = *budget.Take(60, "a request");
  EXPECT_EQ(budget.Take(41, "an answer").status(),
            absl::ResourceExhaustedError("an answer needs 41 bytes; 40 of budgets.in_flight_bytes "
                                         "= 100 are free; retry later"));
  EXPECT_EQ(budget.Take(101, "an answer").status(),
            absl::ResourceExhaustedError("an answer needs 101 bytes; 40 of "
                                         "budgets.in_flight_bytes = 100 are free; ask for less"));
  EXPECT_EQ(budget.used(), 60);
  room.reset();
  EXPECT_EQ(budget.used(), 0);
  EXPECT_TRUE(budget.Take(100, "an answer").ok());
}

TEST(MemoryBudgetTest, RoomsGrowShrinkAndMove) {
  const MemoryBudget budget(100, "b");
  MemoryRoom room = *budget.Take(10, "x");
  EXPECT_TRUE(room.Grow(90, "x").ok());
  EXPECT_EQ(room.Grow(1, "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(room.bytes(), 100);
  room.Shrink(70);
  EXPECT_EQ(budget.used(), 30);
  room.Shrink(1000);  // not more than it has
  EXPECT_EQ(budget.used(), 0);
  EXPECT_TRUE(room.Grow(40, "x").ok());
  {
    const MemoryRoom moved = std::move(room);
    EXPECT_EQ(budget.used(), 40);
  }
  EXPECT_EQ(budget.used(), 0);
}

TEST(MemoryBudgetTest, ARoomOutlivesItsBudget) {
  MemoryRoom room;
  {
    const MemoryBudget budget(100, "b");
    room = *budget.Take(60, "x");
  }
  EXPECT_EQ(room.Grow(41, "x").code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryBudgetTest, ManyThreadsNeverTakeMoreThanThereIs) {
  constexpr int kThreads = 4;
  const MemoryBudget budget(kThreads - 1, "b");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&budget] {
      for (int i = 0; i < 20'000; ++i) {
        const auto room = budget.Take(1, "x");
        // Takers that are refused show for a moment.
        EXPECT_LE(budget.used(), 2 * kThreads);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used(), 0);
}

}  // namespace memory_budget_test
}  // namespace emberd::rpc
