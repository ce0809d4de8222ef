#include "server/coordinator/programs/program_cache.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace emberd::coordinator {
namespace program_cache_test {

absl::StatusOr<std::shared_ptr<const Program>> AnyProgram() {
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::ELEMENTWISE);
  return Program::Compile(spec, "key", nullptr, nullptr);
}

class ProgramCacheTest : public ::testing::Test {
 protected:
  static ProgramCache::Options Options(int capacity, absl::Duration lease) {
    return {.capacity = capacity, .lease = lease, .new_handle = [next = uint64_t{0}]() mutable {
              return ++next;
            }};
  }
  ProgramCache::Compiled Compile(ProgramCache* cache, const std::string& key) {
    auto compiled = cache->Compile(key, [this] {
      ++compiled_;
      return AnyProgram();
    });
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return *compiled;
  }

  int compiled_ = 0;  // calls of factories
};

TEST_F(ProgramCacheTest, OneThatIsPushedOutLivesUntilItsLastReferenceAndComesBack) {
  ProgramCache cache(Options(1, absl::InfiniteDuration()));
  const uint64_t a = Compile(&cache, "a").handle;
  const uint64_t b = Compile(&cache, "b").handle;  // pushes a out
  EXPECT_TRUE(cache.Find(a).ok());
  const ProgramCache::Compiled again = Compile(&cache, "a");  // which comes back and pushes b out
  EXPECT_TRUE(again.cached);
  EXPECT_EQ(again.handle, a);
  EXPECT_EQ(compiled_, 2);
  // The last reference of one that is not kept.
  EXPECT_TRUE(cache.Release({b}).ok());
  EXPECT_EQ(cache.Find(b).status().message(), absl::StrCat("No executable found for uid ", b));
  // The newest one stays without references.
  EXPECT_TRUE(cache.Release({a, a}).ok());
  EXPECT_TRUE(cache.Find(a).ok());
  EXPECT_FALSE(cache.Release({a}).ok());
  EXPECT_TRUE(Compile(&cache, "a").cached);
  EXPECT_EQ(cache.count(), 1);
}

TEST_F(ProgramCacheTest, AllReferencesAreGivenBackOrNone) {
  ProgramCache cache(Options(8, absl::InfiniteDuration()));
  const uint64_t a = Compile(&cache, "a").handle;
  EXPECT_EQ(cache.Release({a, a}).message(), absl::StrCat("No cache entry found for uid ", a));
  EXPECT_EQ(cache.Release({a, 99}).message(), "No cache entry found for uid 99");
  EXPECT_TRUE(cache.Release({a}).ok());
}

TEST_F(ProgramCacheTest, AllWhoWaitGetTheFailureAndTheNextTriesAgain) {
  ProgramCache cache(Options(8, absl::InfiniteDuration()));
  absl::Notification one_compiles, all_wait;
  const auto fail = [&]() -> absl::StatusOr<std::shared_ptr<const Program>> {
    if (!one_compiles.HasBeenNotified()) one_compiles.Notify();
    all_wait.WaitForNotification();
    return absl::ResourceExhaustedError("too large");
  };
  std::vector<absl::Status> statuses(8);
  std::vector<std::thread> threads;
  for (absl::Status& status : statuses) {
    threads.emplace_back([&] { status = cache.Compile("a", fail).status(); });
  }
  one_compiles.WaitForNotification();
  all_wait.Notify();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_EQ(status.message(), "too large");
  EXPECT_FALSE(Compile(&cache, "a").cached);
}

TEST_F(ProgramCacheTest, UnusedOnesThatWerePushedOutAreForgotten) {
  ProgramCache cache(Options(1, absl::Hours(1)));
  const uint64_t a = Compile(&cache, "a").handle;
  const uint64_t b = Compile(&cache, "b").handle;
  cache.Sweep(absl::Now() + absl::Minutes(59));
  EXPECT_TRUE(cache.Find(a).ok());
  cache.Sweep(absl::Now() + absl::Hours(2));
  EXPECT_FALSE(cache.Find(a).ok());
  EXPECT_TRUE(cache.Find(b).ok());
}

}  // namespace program_cache_test
}  // namespace emberd::coordinator
