// Catches: something that is told of before it is there, twice, or not at all, and what is told of
// in the order in which it was made.
#include <algorithm>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "server/step/step.h"

namespace emberd::step {
namespace combined_in_order_test {

TEST(CombinedInOrderTest, EveryOrderIsToldInOrder) {
  const std::vector<size_t> bytes = {3, 1, 5, 0, 2, 4};
  std::vector<size_t> made(bytes.size());
  std::iota(made.begin(), made.end(), 0);
  do {
    for (const size_t enough : {size_t{1}, size_t{4}, size_t{100}}) {
      std::vector<bool> is_there(bytes.size());
      size_t told = 0;
      CombinedInOrder in_order(bytes, enough, [&](size_t begin, size_t end) {
        ASSERT_EQ(begin, told);
        ASSERT_LT(begin, end);
        size_t size = 0;
        for (size_t i = begin; i < end; ++i) {
          ASSERT_TRUE(is_there[i]) << i;
          size += bytes[i];
        }
        ASSERT_GE(size, enough);
        told = end;
      });
      for (const size_t index : made) {
        is_there[index] = true;
        in_order.Add(index);
        // What could be told of has been, but for the end.
        size_t end = told, waiting = 0;
        while (end < bytes.size() && is_there[end]) waiting += bytes[end++];
        ASSERT_TRUE(waiting < enough || end == bytes.size());
      }
      ASSERT_LT(told, bytes.size()) << "the end is not told of";
    }
  } while (std::next_permutation(made.begin(), made.end()));
}

TEST(CombinedInOrderTest, SeveralThreadsAreToldOfOnce) {
  constexpr size_t kThings = 20'000, kThreads = 4;
  size_t told = 0;
  CombinedInOrder in_order(std::vector<size_t>(kThings, 1), 3, [&](size_t begin, size_t end) {
    EXPECT_EQ(begin, told);
    told = end;
  });
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < kThings; i += kThreads) in_order.Add(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(told, kThings / 2);
  EXPECT_LT(told, kThings);
}

}  // namespace combined_in_order_test
}  // namespace emberd::step
