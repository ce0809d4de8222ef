#include "server/ops/metric_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/ops/metrics.h"

namespace emberd::ops {
namespace metric_registry_test {

using ::testing::ElementsAre;

std::vector<std::vector<std::string>> LabelsOf(const std::vector<MetricSnapshot::Series>& all) {
  std::vector<std::vector<std::string>> labels;
  for (const auto& series : all) labels.push_back(series.labels);
  return labels;
}

TEST(MetricSnapshotTest, HasEveryTypeByItsLabels) {
  Metrics metrics("coordinator");
  ServerMetrics* server = metrics.Server("coordinator", 3);
  server->Set(MetricId::kModels, 7);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.25);
  metrics.AddRpcBytes(Rpc::kLookup, 100, 1000);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.5);
  metrics.AddRpcBytes(Rpc::kLookup, 100, 1000);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kUnavailable, 0.5);
  metrics.AddRpcBytes(Rpc::kLookup, 1, 0);
  metrics.ObserveRpc(Rpc::kDrain, absl::StatusCode::kOk, 0.5);
  metrics.AddRpcBytes(Rpc::kDrain, 1, 0);

  const MetricSnapshot snapshot(metrics.collectables());
  const std::string lookup = "EmbeddingService/Lookup";
  EXPECT_EQ(snapshot.Value(MetricId::kModels, {"coordinator-3"}), 7);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcs, {lookup, "OK"}), 2);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcRequestBytes, {lookup}), 201);
  const MetricSnapshot::Series* seconds = snapshot.Find(MetricId::kRpcSeconds, {lookup});
  ASSERT_NE(seconds, nullptr);
  EXPECT_EQ(seconds->histogram.sample_count, 3u);
  EXPECT_DOUBLE_EQ(seconds->histogram.sample_sum, 1.25);
  ASSERT_FALSE(seconds->histogram.bucket.empty());
  EXPECT_EQ(seconds->histogram.bucket.back().cumulative_count, 3u);
  EXPECT_THAT(LabelsOf(snapshot.All(MetricId::kRpcs)),
              ElementsAre(ElementsAre("AdminService/Drain", "OK"), ElementsAre(lookup, "OK"),
                          ElementsAre(lookup, "UNAVAILABLE")));
}

TEST(MetricSnapshotTest, WhatHasNotHappenedIsMissing) {
  const Metrics metrics("coordinator");
  const MetricSnapshot snapshot(metrics.collectables());
  EXPECT_EQ(snapshot.Find(MetricId::kRpcSeconds, {"EmbeddingService/Lookup"}), nullptr);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcs, {"EmbeddingService/Lookup", "OK"}), 0);
  EXPECT_TRUE(snapshot.All(MetricId::kGroupSteps).empty());
}

}  // namespace metric_registry_test
}  // namespace emberd::ops
