#include "shard/store/initializer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace emberd::shard {
namespace initializer_test {

v1::InitializerConfig Normal(bool truncated, float mean, float stddev) {
  v1::InitializerConfig config;
  v1::NormalInitializer* normal =
      truncated ? config.mutable_truncated_normal() : config.mutable_normal();
  normal->set_mean(mean);
  normal->set_stddev(stddev);
  return config;
}

v1::InitializerConfig Uniform(float lower, float upper) {
  v1::InitializerConfig config;
  config.mutable_uniform()->set_lower(lower);
  config.mutable_uniform()->set_upper(upper);
  return config;
}

std::vector<float> Sample(const Initializer& initializer, int rows, int columns) {
  std::vector<float> values(rows * columns);
  for (int r = 0; r < rows; ++r)
    initializer.Fill(r, absl::MakeSpan(values).subspan(r * columns, columns));
  return values;
}

double Mean(const std::vector<float>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}
double Deviation(const std::vector<float>& values) {
  const double mean = Mean(values);
  double sum = 0;
  for (const float v : values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / values.size());
}

TEST(Initializer, SimpleKinds) {
  std::vector<float> row(5, 9.0f);
  v1::InitializerConfig config;
  config.mutable_zeros();
  EXPECT_TRUE(Initializer(1, "t", config).AllZero());
  Initializer(1, "t", config).Fill(3, absl::MakeSpan(row));
  EXPECT_EQ(row, std::vector<float>(5, 0.0f));
  config.mutable_constant()->set_value(2.5f);
  EXPECT_FALSE(Initializer(1, "t", config).AllZero());
  Initializer(1, "t", config).Fill(3, absl::MakeSpan(row));
  EXPECT_EQ(row, std::vector<float>(5, 2.5f));
  config.mutable_row_id();
  Initializer(1, "t", config).Fill(1234567, absl::MakeSpan(row));
  EXPECT_EQ(row, std::vector<float>(5, 1234567.0f));
}

// Expected values of the distributions; 200,000 draws, so that each tolerance is above 5 sigma.
TEST(Initializer, DistributionsHaveTheirMoments) {
  const std::vector<float> uniform = Sample(Initializer(5, "t", Uniform(-1, 3)), 2000, 100);
  EXPECT_NEAR(Mean(uniform), 1, 0.015);
  EXPECT_NEAR(Deviation(uniform), 4 / std::sqrt(12), 0.01);
  EXPECT_GE(*std::min_element(uniform.begin(), uniform.end()), -1);
  EXPECT_LT(*std::max_element(uniform.begin(), uniform.end()), 3);

  const std::vector<float> normal = Sample(Initializer(5, "t", Normal(false, 2, 0.5f)), 2000, 100);
  EXPECT_NEAR(Mean(normal), 2, 0.006);
  EXPECT_NEAR(Deviation(normal), 0.5, 0.005);
  EXPECT_GT(*std::max_element(normal.begin(), normal.end()), 2 + 3.5 * 0.5);

  const std::vector<float> truncated =
      Sample(Initializer(5, "t", Normal(true, 2, 0.5f)), 2000, 100);
  EXPECT_NEAR(Mean(truncated), 2, 0.006);
  EXPECT_NEAR(Deviation(truncated), 0.5 * 0.8796, 0.005);  // of a normal cut at 2 deviations
  EXPECT_GE(*std::min_element(truncated.begin(), truncated.end()), 1);
  EXPECT_LE(*std::max_element(truncated.begin(), truncated.end()), 3);
}

TEST(Initializer, UniformNeverReachesItsUpperEnd) {
  const float upper = std::nextafter(1.0f, 2.0f);
  for (const float v : Sample(Initializer(1, "t", Uniform(1, upper)), 100, 10)) EXPECT_EQ(v, 1);
  for (const float v : Sample(Initializer(1, "t", Uniform(1, 1)), 1, 10)) EXPECT_EQ(v, 1);
}

// Prevents rows, columns, tables or seeds that repeat one another.
TEST(Initializer, ValuesDependOnSeedTableRowAndColumn) {
  const auto first = [](uint64_t seed, const std::string& table, int64_t row) {
    std::vector<float> values(16);
    Initializer(seed, table, Normal(false, 0, 1)).Fill(row, absl::MakeSpan(values));
    return values;
  };
  std::set<float> seen;
  const auto add = [&](const std::vector<float>& values) {
    seen.insert(values.begin(), values.end());
  };
  add(first(1, "a", 0));
  add(first(1, "a", 1));
  add(first(1, "a", int64_t{1} << 40));
  add(first(2, "a", 0));
  add(first(1, "b", 0));
  EXPECT_EQ(seen.size(), 5u * 16);
  // A shorter row holds the leading columns of a longer one.
  std::vector<float> leading(3);
  Initializer(1, "a", Normal(false, 0, 1)).Fill(0, absl::MakeSpan(leading));
  const std::vector<float> row = first(1, "a", 0);
  EXPECT_TRUE(std::equal(leading.begin(), leading.end(), row.begin()));
}

// Prevents a change of the generator: tables of a running cluster would no longer agree with new
// ones.
TEST(Initializer, ValuesAreFrozen) {
  std::vector<float> values(3);
  Initializer(42, "table", Normal(true, 0, 1)).Fill(7, absl::MakeSpan(values));
  EXPECT_EQ(values, (std::vector<float>{-1.11665761f, -0.243086189f, -1.06339061f}));
  Initializer(42, "table", Uniform(-1, 1)).Fill(7, absl::MakeSpan(values));
  EXPECT_EQ(values, (std::vector<float>{-0.770937085f, -0.201216787f, -0.746354461f}));
}

}  // namespace initializer_test
}  // namespace emberd::shard
