// A shard that takes the last memory is killed, and its rows are gone.
#include <string>

#include <gtest/gtest.h>

#include "server/rpc/budgets.h"

namespace emberd::rpc {
namespace memory_guard_test {

constexpr int64_t kMiB = int64_t{1} << 20;

class MemoryGuardTest : public ::testing::Test {
 protected:
  // Of a machine with 1600 MiB; a sixteenth is kept free.
  absl::Status Check(int64_t available, int64_t most, int64_t needed) {
    MemoryGuard guard(2, [available] { return MachineMemory{1600 * kMiB, available}; });
    EXPECT_EQ(guard.share(), 800 * kMiB);
    asked_ = false;
    return guard
        .Check(most,
               [&] {
                 asked_ = true;
                 return needed;
               })
        .status();
  }
  bool asked_ = false;
};

TEST_F(MemoryGuardTest, LooksCloserOnlyWhereItMatters) {
  EXPECT_TRUE(Check(1900 * kMiB, 900 * kMiB, 0).ok());
  EXPECT_FALSE(asked_);
  EXPECT_TRUE(Check(0, 0, 0).ok());  // every row was touched
  EXPECT_FALSE(asked_);
  EXPECT_TRUE(Check(1899 * kMiB, 900 * kMiB, 899 * kMiB).ok());
  EXPECT_TRUE(asked_);
  EXPECT_TRUE(Check(0, 1, 0).ok());  // none of these rows is new
}

TEST_F(MemoryGuardTest, SaysWhatIsMissing) {
  const absl::Status status = Check(200 * kMiB, 900 * kMiB, 51 * kMiB);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(status.message()),
            "the rows that this touches for the first time need 53477376 bytes on each of 2 shards "
            "of this machine; 209715200 of 1677721600 bytes of memory are left, of which 104857600 "
            "are kept free. Rows that were touched before are still served. Give the process more "
            "memory, add shards, or store rows in 16 bits");
  EXPECT_TRUE(Check(200 * kMiB, 900 * kMiB, 50 * kMiB).ok());
}

// Would catch: steps that are each told that the memory is there, and touch their rows together.
TEST(MemoryGuard, CountsWhatOthersMayTakeAndHaveNotYet) {
  MemoryGuard guard(2, [] { return MachineMemory{1600 * kMiB, 300 * kMiB}; });
  const auto check = [&] { return guard.Check(900 * kMiB, [] { return 60 * kMiB; }); };
  {
    const auto first = check();
    ASSERT_TRUE(first.ok()) << first.status();
    const absl::Status second = check().status();
    EXPECT_EQ(second.code(), absl::StatusCode::kResourceExhausted) << second;
  }
  EXPECT_TRUE(check().ok());
}

TEST(MemoryGuard, LoadsOnAllShardsOfTheMachineAtOnce) {
  MemoryGuard guard(2, [] { return MachineMemory{1600 * kMiB, 1100 * kMiB}; });
  EXPECT_TRUE(guard.CheckLoad(500 * kMiB).ok());
  const absl::Status status = guard.CheckLoad(500 * kMiB + 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(status.message()),
            "the rows to be loaded need 524288001 bytes on each of 2 shards of this machine, in "
            "addition to what they serve; 1153433600 of 1677721600 bytes of memory are left, of "
            "which 104857600 are kept free. Give the process more memory, add shards, store rows "
            "in 16 bits, or drop what is served before");
}

TEST(MemoryGuard, RefusesNothingWhereNothingCanBeRead) {
  MemoryGuard guard(1, [] { return MachineMemory{}; });
  EXPECT_TRUE(guard.Check(kMiB, [] { return kMiB; }).ok());
  EXPECT_TRUE(guard.CheckLoad(kMiB).ok());
}

}  // namespace memory_guard_test
}  // namespace emberd::rpc
