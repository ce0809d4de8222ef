// Ten times as many lookups as the cluster can answer. A failure here means that requests pile up,
// that what cannot be served in time is not refused with the reason, or that the cluster serves no
// better when the flood is over. How well it does is for `./run bench overload`.
#include "tests/testing/overload.h"

#include <atomic>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/footprint.h"

namespace emberd::testing {
namespace overload_test {

// Of all processes: 256 MiB, or more where a sanitizer keeps freed memory.
constexpr int64_t kMostGrowthKib = 8 * kAllowedGrowthKib;

TEST(OverloadTest, RefusesWhatItCannotServeAndGoesOn) {
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start(
      {.shards = 2, .config = "budgets { max_waiting_requests: 100 client_requests: 1000000 }"});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const absl::StatusOr<OverloadResult> result =
      Overload(**cluster, absl::Seconds(2), absl::Seconds(2));
  ASSERT_TRUE(result.ok()) << result.status();
  const LoadResult& flood = result->flood;
  std::cout << "peak " << result->peak << "/s; of " << flood.sent << " requests " << flood.good
            << " answered, " << flood.refused << " refused, " << flood.late << " late; goodput "
            << result->goodput << "/s; at most " << result->most_waiting
            << " waiting; recovered after " << result->recovery << "; growth "
            << result->resident_growth_kib << " KiB\n";
  EXPECT_GT(flood.good, 0);
  EXPECT_GT(flood.refused, 0);
  EXPECT_EQ(flood.other, 0) << flood.other_error;
  EXPECT_LE(result->most_waiting, 100);
  EXPECT_TRUE(result->serves);
  EXPECT_LT(result->resident_growth_kib, kMostGrowthKib);
}

// What this would catch: a lookup that waits behind others until its caller has given up, or that
// is refused without the figures. A stopped shard keeps lookups until their deadlines, and so the
// coordinator learns how long they take.
using LateLookupTest = ClusterFixture;
TEST_F(LateLookupTest, IsRefusedWithTheFigures) {
  StartCluster({.shards = 2}, MixedModel("mixed"));
  client::ClientOptions options = cluster_->client_options();
  options.max_attempts = 1;
  options.transport = client::TransportKind::kTcp;  // a lane is a thread of its own: nothing waits
  const auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto look_up = [&](absl::Duration deadline) {
    const std::vector<OwnedIds> batch = MixedBatch(1, 32);
    return (*client)
        ->Lookup(model_, Features(batch), {.inference = true, .deadline = deadline})
        .status();
  };
  cluster_->SuspendShard(1);
  std::atomic<bool> stop = false;
  std::vector<std::thread> waiting;
  for (int i = 0; i < 10; ++i) {
    waiting.emplace_back([&] {
      while (!stop) look_up(absl::Seconds(1)).IgnoreError();
    });
  }
  // Until the coordinator knows, one that has waited for too long already may be refused instead.
  const absl::Status refused =
      Await([&] { return look_up(absl::Milliseconds(300)); },
            [](const absl::Status& status) {
              return absl::IsResourceExhausted(status) &&
                     absl::StrContains(status.message(), "are waiting already");
            });
  stop = true;
  for (std::thread& thread : waiting) thread.join();
  EXPECT_THAT(std::string(refused.message()),
              ::testing::MatchesRegex("[0-9]+ requests are waiting already; after them this one "
                                      "would take [0-9]+ ms, but its deadline is in [0-9]+ ms; "
                                      "retry later"))
      << refused;
  cluster_->ResumeShard(1);
  const absl::Status served = Await([&] { return look_up(kPatience); });
  EXPECT_TRUE(served.ok()) << served;
}

}  // namespace overload_test
}  // namespace emberd::testing
