// The same for cluster descriptions: each case breaks one rule.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "config/config.h"

namespace emberd::config {
namespace {

constexpr char kGoodCluster[] = R"pb(
  shards { address: "h0:70" http_address: "h0:90" }
  shards { address: "h1:70" http_address: "h1:90" }
  sparsecores_per_shard: 2
  coordinators { address: "c:70" http_address: "c:90" }
)pb";

struct BadCluster {
  const char* name;
  const char* find;         // part of kGoodCluster
  const char* replacement;  // makes it bad
  const char* error;        // start of the message
};

class BadClusterTest : public testing::TestWithParam<BadCluster> {};

TEST_P(BadClusterTest, IsRefusedWithThePathOfTheField) {
  const BadCluster& bad = GetParam();
  ASSERT_NE(std::string(kGoodCluster).find(bad.find), std::string::npos);
  const auto cluster =
      ParseCluster(absl::StrReplaceAll(kGoodCluster, {{bad.find, bad.replacement}}));
  EXPECT_EQ(cluster.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(cluster.status().message()), testing::StartsWith(bad.error));
}

const BadCluster kBadClusters[] = {
    {"NoAddress", "address: \"h0:70\"", "",
     "shards[0].address: \"\" is not allowed; it must be \"host:port\""},
    {"NoPort", "\"h1:70\"", "\"h1\"", "shards[1].address: \"h1\" is not allowed"},
    {"EmptyPort", "\"h1:70\"", "\"h1:\"", "shards[1].address: \"h1:\" is not allowed"},
    {"HugePort", "\"h1:70\"", "\"h1:65536\"", "shards[1].address: \"h1:65536\" is not allowed"},
    {"NegativePort", "\"c:70\"", "\"c:-1\"", "coordinators[0].address: \"c:-1\" is not allowed"},
    {"NamedPort", "\"c:70\"", "\"c:http\"", "coordinators[0].address: \"c:http\" is not"},
    {"NoHost", "\"h1:70\"", "\":70\"", "shards[1].address: \":70\" is not allowed"},
    {"HostWithSpace", "\"h1:70\"", "\"h 1:70\"", "shards[1].address: \"h 1:70\" is not"},
    {"Url", "\"h1:70\"", "\"http://h1:70\"", "shards[1].address: \"http://h1:70\" is not"},
    {"Ipv6WithoutBrackets", "\"h1:70\"", "\"::1:70\"", "shards[1].address: \"::1:70\" is not"},
    {"BadMetricsAddress", "\"h1:90\"", "\"90\"", "shards[1].http_address: \"90\" is not"},
    {"TwoShardsOfAnAddress", "\"h1:70\"", "\"h0:70\"",
     "shards[1].address: \"h0:70\" is not allowed; it must be unique; it is also "
     "shards[0].address"},
    {"SameAddressInOtherLetters", "\"h1:70\"", "\"H0:70\"", "shards[1].address: \"H0:70\" is"},
    {"MetricsOnTheApi", "\"h1:90\"", "\"h1:70\"",
     "shards[1].http_address: \"h1:70\" is not allowed; it must be unique; it is also "
     "shards[1].address"},
    {"CoordinatorOnAShard", "\"c:70\"", "\"h0:70\"", "coordinators[0].address: \"h0:70\" is not"},
    {"ThreeShards", "coordinators", "shards { address: \"h2:70\" } coordinators",
     "shards: a number of 3 is not allowed; it must be a power of two"},
    {"ThreeSparseCores", "sparsecores_per_shard: 2", "sparsecores_per_shard: 3",
     "sparsecores_per_shard: 3 is not allowed; it must be a power of two"},
    {"ManySparseCores", "sparsecores_per_shard: 2", "sparsecores_per_shard: 128",
     "sparsecores_per_shard: 128 is not allowed; it must be in [1, 64]"},
    {"NegativeSparseCores", "sparsecores_per_shard: 2", "sparsecores_per_shard: -2",
     "sparsecores_per_shard: -2 is not allowed"},
    {"NegativeThreads", "coordinators", "shard_threads: -1 coordinators",
     "shard_threads: -1 is not allowed; it must be in [0, 1024]"},
    {"ManyThreads", "coordinators", "coordinator_threads: 5000 coordinators",
     "coordinator_threads: 5000 is not allowed"},
    {"NegativeBudget", "coordinators", "budgets { bytes_per_sparsecore: -1 } coordinators",
     "budgets.bytes_per_sparsecore: -1 is not allowed; it must be in [1, 1125899906842624]"},
    {"NegativeBatchBudget", "coordinators", "budgets { batch_bytes: -1 } coordinators",
     "budgets.batch_bytes: -1 is not allowed"},
    {"NegativeBatches", "coordinators", "budgets { max_batches: -1 } coordinators",
     "budgets.max_batches: -1 is not allowed; it must be >= 1"},
    {"HugeMessages", "coordinators", "budgets { max_message_bytes: 2147483648 } coordinators",
     "budgets.max_message_bytes: 2147483648 is not allowed; it must be in [1, 2147483647]"},
    {"HugeInFlight", "coordinators",
     "budgets { in_flight_bytes: 9223372036854775807 } coordinators",
     "budgets.in_flight_bytes: 9223372036854775807 is not allowed"},
    {"NegativeTtl", "coordinators", "timeouts { batch_ttl_ms: -1 } coordinators",
     "timeouts.batch_ttl_ms: -1 is not allowed"},
    {"HugeDeadline", "coordinators", "timeouts { shard_call_ms: 2147483648 } coordinators",
     "timeouts.shard_call_ms: 2147483648 is not allowed"},
    {"NegativeDrain", "coordinators", "timeouts { drain_ms: -10 } coordinators",
     "timeouts.drain_ms: -10 is not allowed"},
    {"UnknownFormat", "coordinators", "logging { format: 7 } coordinators",
     "logging.format: 7 is not allowed; it must be one of TEXT, JSON"},
    {"UnknownLevel", "coordinators", "logging { level: 7 } coordinators",
     "logging.level: 7 is not allowed; it must be one of DEBUG, INFO, WARNING, ERROR"},
};

INSTANTIATE_TEST_SUITE_P(All, BadClusterTest, testing::ValuesIn(kBadClusters),
                         [](const testing::TestParamInfo<BadCluster>& info) {
                           return info.param.name;
                         });

TEST(BadCluster, TheClusterThatTheCasesBreakIsGood) {
  EXPECT_TRUE(ParseCluster(kGoodCluster).ok());
}

TEST(BadCluster, NeedsAShard) {
  EXPECT_EQ(ParseCluster("").status().message(), "shards: empty; at least one is needed");
}

TEST(BadCluster, PartitionsEndAt1024) {
  std::string shards;
  for (int i = 0; i < 32; ++i) absl::StrAppend(&shards, "shards { address: 'h", i, ":1' }\n");
  EXPECT_TRUE(ParseCluster(shards + "sparsecores_per_shard: 32").ok());
  EXPECT_EQ(ParseCluster(shards + "sparsecores_per_shard: 64").status().message(),
            "shards: a number of 32 is not allowed; it must be at most 16 with 64 SparseCores per "
            "shard (1024 partitions)");
}

}  // namespace
}  // namespace emberd::config
