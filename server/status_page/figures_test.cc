// What this would catch: a coordinator that is left out of the sum, or that does not answer and is
// counted all the same.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/status_page/status_page.h"

namespace emberd::status_page {
namespace figures_test {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr int64_t kStart = 1'000'000;

// A coordinator that has made `rate` steps a second for `seconds`, half of its lookups in 10 to
// 20 ms and half in 20 to 40 ms; of ten, one failed.
v1::GetStatsResponse Stats(int64_t seconds, int64_t rate) {
  v1::GetStatsResponse stats;
  const int64_t steps = seconds * rate;
  stats.set_time_ms(kStart + 1000 * seconds);
  stats.set_uptime_ms(1000 * seconds);
  stats.set_train_streams(1);
  for (const char* name : {"a", "b"}) {
    v1::StackStats* const stack = stats.add_stacks();
    stack->set_model("m");
    stack->set_stack(name);
    stack->set_batches(steps);
    stack->set_largest_ids_per_partition(rate);
  }
  v1::MethodStats* const lookup = stats.add_methods();
  lookup->set_method("EmbeddingService/Lookup");
  (*lookup->mutable_codes())["OK"] = steps;
  (*lookup->mutable_codes())["UNAVAILABLE"] = steps / 10;
  lookup->set_request_bytes(100 * steps);
  lookup->set_response_bytes(1000 * steps);
  lookup->mutable_seconds()->set_count(steps);
  const std::pair<double, int64_t> buckets[] = {{0.01, 0},
                                                {0.02, steps / 2},
                                                {0.04, steps},
                                                {std::numeric_limits<double>::infinity(), steps}};
  for (const auto& [upper, count] : buckets) {
    auto* const bucket = lookup->mutable_seconds()->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
  v1::GroupStats* const group = stats.add_groups();
  group->set_model("m");
  group->set_group("nightly");
  group->set_updates(steps);
  (*group->mutable_last_arrivals())["0"] = steps;
  return stats;
}

CoordinatorFigures Coordinator(const std::string& name, const v1::GetStatsResponse& stats) {
  return {.name = name, .stats = stats};
}
CoordinatorFigures OutOfReach(const std::string& name) {
  return {.name = name, .status = absl::UnavailableError("nobody there")};
}

TEST(FiguresTest, SumsCoordinators) {
  const v1::GetStatsResponse sum =
      Merge({Coordinator("coordinator-0", Stats(10, 20)),
             Coordinator("coordinator-1", Stats(10, 30)), OutOfReach("coordinator-2")});
  EXPECT_EQ(sum.train_streams(), 2);
  ASSERT_EQ(sum.stacks_size(), 2);
  EXPECT_EQ(sum.stacks(1).batches(), 500);
  EXPECT_EQ(sum.stacks(1).largest_ids_per_partition(), 30);
  ASSERT_EQ(sum.methods_size(), 1);
  EXPECT_EQ(sum.methods(0).codes().at("UNAVAILABLE"), 50);
  EXPECT_EQ(sum.methods(0).seconds().count(), 500);
  EXPECT_EQ(sum.methods(0).seconds().buckets(1).count(), 250);
  ASSERT_EQ(sum.groups_size(), 1);
  EXPECT_THAT(sum.groups(0).last_arrivals(), ElementsAre(Pair("0", 500)));
  EXPECT_EQ(sum.uptime_ms(), 10000);
}

}  // namespace figures_test
}  // namespace emberd::status_page
