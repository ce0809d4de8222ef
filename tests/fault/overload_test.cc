// Ten times as many lookups as the cluster can answer. A failure here means that requests pile up,
// that what cannot be served in time is not refused with the reason, or that the cluster serves no
// better when the flood is over. How well it does is for `./run bench overload`.
#include "tests/testing/overload.h"

#include <iostream>
#include <memory>

#include "gtest/gtest.h"
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

}  // namespace overload_test
}  // namespace emberd::testing
