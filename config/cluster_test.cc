#include <gtest/gtest.h>

#include "config/config.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace {

constexpr char kOneShard[] = "shards { address: 'localhost:7000' }";

TEST(CompleteCluster, WritesTheDefaultsOfTheProtoFile) {
  const auto cluster = ParseCluster(kOneShard);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->sparsecores_per_shard(), 2);
  EXPECT_EQ(cluster->budgets().bytes_per_sparsecore(), int64_t{16} << 30);
  EXPECT_EQ(cluster->budgets().batch_bytes(), int64_t{1} << 30);
  EXPECT_EQ(cluster->budgets().max_batches(), 1024);
  EXPECT_EQ(cluster->budgets().max_message_bytes(), int64_t{1} << 30);
  EXPECT_EQ(cluster->budgets().in_flight_bytes(), int64_t{4} << 30);
  EXPECT_EQ(cluster->budgets().max_train_streams(), 512);
  EXPECT_EQ(cluster->budgets().client_requests(), 256);
  EXPECT_EQ(cluster->budgets().client_in_flight_bytes(), int64_t{4} << 30);
  EXPECT_EQ(cluster->budgets().connection_calls(), 1024);
  EXPECT_EQ(cluster->budgets().max_waiting_requests(), 1024);
  EXPECT_EQ(cluster->timeouts().batch_ttl_ms(), 120000);
  EXPECT_EQ(cluster->timeouts().shard_call_ms(), 30000);
  EXPECT_EQ(cluster->timeouts().drain_ms(), 10000);
  EXPECT_EQ(cluster->logging().format(), v1::LoggingConfig::TEXT);
  EXPECT_EQ(cluster->logging().level(), v1::LoggingConfig::INFO);
  EXPECT_GE(cluster->shard_threads(), 1);
  EXPECT_GE(cluster->coordinator_threads(), 1);
}

TEST(CompleteCluster, KeepsWhatIsGiven) {
  auto cluster = ParseCluster(
      "shards { address: 'a:0' } sparsecores_per_shard: 8 shard_threads: 3 "
      "budgets { max_batches: 5 } timeouts { drain_ms: 1 } logging { level: DEBUG file: 'x' }");
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->sparsecores_per_shard(), 8);
  EXPECT_EQ(cluster->shard_threads(), 3);
  EXPECT_EQ(cluster->budgets().max_batches(), 5);
  EXPECT_EQ(cluster->timeouts().drain_ms(), 1);
  EXPECT_EQ(cluster->logging().level(), v1::LoggingConfig::DEBUG);
  EXPECT_EQ(cluster->logging().file(), "x");
}

TEST(CompleteCluster, IsIdempotent) {
  auto cluster = ParseCluster(kOneShard);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  v1::ClusterConfig again = *cluster;
  ASSERT_TRUE(CompleteCluster(&again).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*cluster, again));
}

TEST(CompleteCluster, LeavesABadClusterAsItWas) {
  v1::ClusterConfig cluster;
  cluster.add_shards()->set_address("nonsense");
  const v1::ClusterConfig before = cluster;
  EXPECT_FALSE(CompleteCluster(&cluster).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(before, cluster));
}

TEST(CompleteCluster, PortZeroMayStandMoreThanOnce) {
  EXPECT_TRUE(ParseCluster("shards { address: '127.0.0.1:0' http_address: '127.0.0.1:0' } "
                           "shards { address: '127.0.0.1:0' http_address: '127.0.0.1:0' }")
                  .ok());
}

// In a container cluster every process has its own 0.0.0.0.
TEST(CompleteCluster, MetricsOfSeveralMachinesMayListenOnOnePort) {
  EXPECT_TRUE(ParseCluster("shards { address: 'a:70' http_address: '0.0.0.0:90' } "
                           "shards { address: 'b:70' http_address: '0.0.0.0:90' } "
                           "coordinators { address: 'c:70' http_address: '[::]:90' } "
                           "coordinators { address: 'd:70' http_address: '[::]:90' }")
                  .ok());
  EXPECT_FALSE(
      ParseCluster("shards { address: '0.0.0.0:70' } shards { address: '0.0.0.0:70' }").ok());
}

}  // namespace
}  // namespace emberd::config
