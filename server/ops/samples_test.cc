#include "server/ops/samples.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::ops {
namespace samples_test {

using ::testing::HasSubstr;

std::vector<double> ValuesOf(const v1::SampledMetric& metric) {
  std::vector<double> values;
  for (const auto& percentile : metric.percentiles()) values.push_back(percentile.value());
  return values;
}

// 1 .. 1024, in an order in which 7 steps lead from one to the next.
TEST(SamplesTest, PercentilesOf1024KnownSamplesAreExact) {
  Samples samples;
  for (int i = 0; i < 1024; ++i) samples.Add("execute", 1 + (i * 7) % 1024);
  const auto metrics = samples.Get("");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  ASSERT_EQ(metrics->metrics_size(), 1);
  const v1::SampledMetric& metric = metrics->metrics(0);
  EXPECT_EQ(metric.name(), "execute");
  EXPECT_EQ(metric.unit(), "seconds");
  EXPECT_EQ(metric.total(), 1024);
  EXPECT_EQ(metric.count(), 1024);
  EXPECT_EQ(metric.min(), 1);
  EXPECT_EQ(metric.max(), 1024);
  EXPECT_EQ(metric.mean(), 512.5);
  EXPECT_DOUBLE_EQ(metric.standard_deviation(), std::sqrt((1024.0 * 1024 - 1) / 12));
  // ceil(p / 100 * 1024).
  EXPECT_EQ(ValuesOf(metric), (std::vector<double>{256, 512, 820, 922, 973, 1014}));
  EXPECT_EQ(metric.percentiles(2).percent(), 80);
}

TEST(SamplesTest, OnlyTheNewestCount) {
  Samples samples;
  samples.Add("a", 1e9);
  for (int i = 1; i <= 1024; ++i) samples.Add("a", i);
  EXPECT_EQ(samples.Get("")->metrics(0).max(), 1024);
  EXPECT_EQ(samples.Get("")->metrics(0).total(), 1025);
  for (int i = 0; i < 1023; ++i) samples.Add("a", 7);
  const v1::SampledMetric metric = samples.Get("")->metrics(0);
  EXPECT_EQ(metric.max(), 1024);  // of before, it is the last one
  EXPECT_EQ(metric.min(), 7);
  EXPECT_EQ(metric.count(), 1024);
}

TEST(SamplesTest, OneSampleIsEveryPercentile) {
  Samples samples;
  samples.Add("compile", 0.25);
  const v1::SampledMetric metric = samples.Get("compile")->metrics(0);
  EXPECT_EQ(ValuesOf(metric), std::vector<double>(6, 0.25));
  EXPECT_EQ(metric.standard_deviation(), 0);
}

TEST(SamplesTest, AnExpressionMatchesCompleteNames) {
  Samples samples;
  for (const char* name : {"execute_chained", "compile", "execute"}) samples.Add(name, 1);
  const auto names = [&](const std::string& regex) {
    std::string text;
    const auto found = samples.Get(regex);
    for (const v1::SampledMetric& metric : found->metrics()) text += metric.name() + " ";
    return text;
  };
  EXPECT_EQ(names(""), "compile execute execute_chained ");
  EXPECT_EQ(names("execute"), "execute ");
  EXPECT_EQ(names("execute.*|compile"), "compile execute execute_chained ");
  EXPECT_EQ(names("xecut"), "");
  const absl::Status bad = samples.Get("execute(").status();
  EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.message()), HasSubstr("regex is 'execute('"));
}

}  // namespace samples_test
}  // namespace emberd::ops
