#include <string>

#include <gtest/gtest.h>

#include "server/rpc/budgets.h"

namespace emberd::rpc {
namespace handle_store_test {

const absl::Time kStart = absl::FromUnixSeconds(1000);

HandleStore<std::string> MakeStore() {
  return HandleStore<std::string>({.max_bytes = 100, .max_count = 2});
}

absl::Status Insert(HandleStore<std::string>& store, uint64_t handle, int64_t bytes) {
  return store.Insert(handle, std::make_shared<std::string>("v"), bytes,
                      kStart + absl::Seconds(handle));
}

TEST(HandleStoreTest, RefusesMoreBytesThanItsBudgetAndSaysTheFigures) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 1, 60).ok());
  const absl::Status status = Insert(store, 2, 50);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(),
            "the batch needs 50 bytes; 40 of budgets.batch_bytes = 100 are free; retry later");
  EXPECT_EQ(store.bytes(), 60);
  EXPECT_EQ(store.count(), 1);
}

TEST(HandleStoreTest, HasPlentyWhileHalfIsLeft) {
  HandleStore<std::string> store = MakeStore();
  EXPECT_TRUE(store.HasPlenty(50));
  EXPECT_FALSE(store.HasPlenty(51));
  ASSERT_TRUE(Insert(store, 1, 40).ok());
  EXPECT_TRUE(store.HasPlenty(10));
  EXPECT_FALSE(store.HasPlenty(11));
}

TEST(HandleStoreTest, RefusesMoreEntriesThanItsBudget) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 1, 1).ok());
  ASSERT_TRUE(Insert(store, 2, 1).ok());
  // Also where bytes are missing, too: none are taken for a moment from those whom they would do.
  for (const int64_t bytes : {1, 101}) {
    const absl::Status status = Insert(store, 3, bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(status.message(), "2 batches are kept; budgets.max_batches is 2");
  }
}

TEST(HandleStoreTest, GivesAValueToOneUserAtATime) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 1, 1).ok());
  ASSERT_TRUE(store.Claim(1).ok());
  EXPECT_EQ(store.Claim(1).status().code(), absl::StatusCode::kUnavailable);
  store.Unclaim(1);
  EXPECT_TRUE(store.Claim(1).ok());
  store.Erase(1);
  EXPECT_EQ(store.Claim(1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.bytes(), 0);
}

// As where a call is made again while its first try is still at work, which may release the batch
// when it finds its caller gone.
TEST(HandleStoreTest, RefusesAHandleThatItHas) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 7, 10).ok());
  const absl::Status second = Insert(store, 7, 20);
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.message(), "batch_handle 7 is kept for an earlier request; retry later");
  EXPECT_EQ(store.bytes(), 10);
  store.Erase(7);
  EXPECT_TRUE(Insert(store, 7, 20).ok());
}

TEST(HandleStoreTest, SweepsWhatExpiredUnlessItIsInUse) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 1, 10).ok());
  ASSERT_TRUE(Insert(store, 5, 10).ok());
  ASSERT_TRUE(store.Claim(1).ok());
  EXPECT_TRUE(store.Sweep(kStart + absl::Seconds(2)).empty());
  store.Unclaim(1);
  EXPECT_EQ(store.Sweep(kStart + absl::Seconds(2)), std::vector<uint64_t>{1});
  EXPECT_EQ(store.bytes(), 10);
  EXPECT_EQ(store.count(), 1);
}

// As by `docker pause`: when it goes on, the sweep may come before all who would have renewed, or
// used, a value.
TEST(HandleStoreTest, TimeInWhichTheProcessStoodStillDoesNotCount) {
  HandleStore<std::string> store = MakeStore();
  ASSERT_TRUE(Insert(store, 100, 10).ok());
  ASSERT_TRUE(store.Insert(1, std::make_shared<std::string>("v"), 10, absl::InfiniteFuture()).ok());
  absl::Time now = kStart;
  EXPECT_TRUE(store.Sweep(now).empty());
  now += absl::Seconds(300);
  EXPECT_TRUE(store.Sweep(now).empty());
  for (int second = 1; second < 100; ++second) {
    now += absl::Seconds(1);
    ASSERT_TRUE(store.Sweep(now).empty()) << second;
  }
  now += absl::Seconds(1);
  EXPECT_EQ(store.Sweep(now), std::vector<uint64_t>{100});
  EXPECT_EQ(store.Endless(), std::vector<uint64_t>{1});
}

}  // namespace handle_store_test
}  // namespace emberd::rpc
