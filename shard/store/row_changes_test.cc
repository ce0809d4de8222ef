#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard/store/stack_store.h"

namespace emberd::shard {
namespace row_changes_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Copier : public ChunkCopier {
 public:
  void CopyBeforeWrite(int64_t chunk) override { copied.push_back(chunk); }
  std::vector<int64_t> copied;
};

std::vector<int64_t> TakeAll(RowChanges& changes, const Copier& copier) {
  std::vector<int64_t> taken;
  int64_t next = changes.first();
  while ((next = changes.TakePending(&copier, next, changes.end())) >= 0) {
    taken.push_back(next++);
  }
  return taken;
}

TEST(RowChangesTest, AReaderTakesWhatNobodyHasChangedBefore) {
  RowChanges changes(/*first=*/10, /*count=*/4);
  const auto copier = std::make_shared<Copier>();
  changes.Begin(/*changed_only=*/false, copier);
  changes.BeforeWrite(12);
  changes.BeforeWrite(12);
  EXPECT_THAT(copier->copied, ElementsAre(12));
  EXPECT_THAT(TakeAll(changes, *copier), ElementsAre(10, 11, 13));
}

TEST(RowChangesTest, AReaderWhoseSnapshotIsOverGetsNothing) {
  RowChanges changes(10, 4);
  const auto copier = std::make_shared<Copier>();
  changes.Begin(false, copier);
  changes.End(copier.get(), /*kept=*/false);
  EXPECT_THAT(TakeAll(changes, *copier), IsEmpty());
}

// Or rows of the next checkpoint would be missing there.
TEST(RowChangesTest, ALateReaderTakesNothingOutOfTheNextSnapshot) {
  RowChanges changes(10, 4);
  const auto old = std::make_shared<Copier>(), next = std::make_shared<Copier>();
  changes.Begin(false, old);
  changes.End(old.get(), false);
  changes.Begin(false, next);
  EXPECT_THAT(TakeAll(changes, *old), IsEmpty());
  changes.End(old.get(), /*kept=*/true);
  EXPECT_THAT(TakeAll(changes, *next), ElementsAre(10, 11, 12, 13));
}

TEST(RowChangesTest, ChangesOfASnapshotThatWasNotKeptAreInTheNext) {
  RowChanges changes(10, 4);
  const auto first = std::make_shared<Copier>(), second = std::make_shared<Copier>(),
             third = std::make_shared<Copier>();
  changes.Begin(false, first);
  changes.End(first.get(), /*kept=*/true);
  changes.BeforeWrite(11);
  changes.BeforeWrite(11);
  EXPECT_EQ(changes.changed(), 1);
  changes.Begin(/*changed_only=*/true, second);
  EXPECT_EQ(changes.changed(), 0);
  changes.BeforeWrite(13);
  changes.End(second.get(), /*kept=*/false);
  EXPECT_EQ(changes.changed(), 2);
  changes.Begin(/*changed_only=*/true, third);
  EXPECT_THAT(TakeAll(changes, *third), ElementsAre(11, 13));
}

}  // namespace row_changes_test
}  // namespace emberd::shard
