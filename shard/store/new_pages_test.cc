// A lookup is refused when the memory for its new rows is not there: counted too low, the shard is
// killed; counted too high, training stops although there is room.
#include <gtest/gtest.h>

#include "shard/store/stack_store.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace new_pages_test {

constexpr int64_t kRows = 1 << 20;  // 32 rows of 128 bytes are a page
constexpr int64_t kPage = 4096;

std::unique_ptr<StackStore> MakeStore(const char* optimizer, int64_t huge_page_bytes) {
  const StackSpec stack =
      testing::OneTableStack({1, kRows, 1}, 32, 32, testing::CompleteOptimizer(optimizer));
  ModelSpec model;
  model.name = "m";
  model.partitions = 1;
  model.partition_count = 1;
  auto store =
      StackStore::Create(model, stack, {.eager_bytes = 0, .huge_page_bytes = huge_page_bytes});
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

TEST(NewPages, CountsEachPageOnce) {
  const auto store = MakeStore("sgd {}", 0);
  EXPECT_EQ(store->UntouchedBytes(), kRows * 128);
  NewPages pages(*store);
  for (const int64_t row : {0, 1, 31, 32, 1000, 1001}) pages.Add(row);
  EXPECT_EQ(pages.bytes(), 3 * kPage);
}

TEST(NewPages, LeavesOutWhatWasTouched) {
  const auto store = MakeStore("sgd {}", 0);
  store->EnsureRow(5);
  EXPECT_EQ(store->UntouchedBytes(), kRows * 128 - kPage);
  NewPages pages(*store);
  pages.Add(6);  // on the page of row 5
  EXPECT_EQ(pages.bytes(), 0);
  pages.Add(32);
  EXPECT_EQ(pages.bytes(), kPage);
}

TEST(NewPages, CountsSlots) {
  const auto adagrad = MakeStore("adagrad {}", 0);
  EXPECT_EQ(adagrad->UntouchedBytes(), kRows * 256);
  NewPages wide(*adagrad);
  wide.Add(7);
  EXPECT_EQ(wide.bytes(), 2 * kPage);

  const auto rowwise = MakeStore("rowwise_adagrad {}", 0);  // 1024 rows' slots are on a page
  NewPages narrow(*rowwise);
  narrow.Add(0);
  narrow.Add(32);
  EXPECT_EQ(narrow.bytes(), 2 * kPage + kPage);
}

TEST(NewPages, CountsHugePagesWhereTheyAreGiven) {
  const auto store = MakeStore("sgd {}", int64_t{1} << 40);
  NewPages pages(*store);
  pages.Add(0);
  pages.Add(40);
  const bool huge = store->weights_memory().huge_pages();
  EXPECT_EQ(pages.bytes(), huge ? int64_t{kHugePage} : 2 * kPage);
  store->EnsureRow(0);
  NewPages after(*store);
  after.Add(40);
  EXPECT_EQ(after.bytes(), huge ? 0 : kPage);
}

}  // namespace new_pages_test
}  // namespace emberd::shard
