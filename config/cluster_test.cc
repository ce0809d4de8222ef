#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/machine_memory.h"
#include "config/config.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace cluster_test {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kOneShard[] = "shards { address: 'localhost:7000' }";

TEST(CompleteCluster, WritesTheDefaultsOfTheProtoFile) {
  const auto cluster = ParseCluster(kOneShard);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->sparsecores_per_shard(), 2);
  EXPECT_EQ(cluster->budgets().max_batches(), 1024);
  EXPECT_EQ(cluster->budgets().max_message_bytes(), int64_t{1} << 30);
  v1::ClusterConfig shares = *ParseCluster(kOneShard);
  shares.clear_budgets();
  FillBudgets(ReadMachineMemory().limit, &shares);
  EXPECT_EQ(cluster->budgets().bytes_per_sparsecore(), shares.budgets().bytes_per_sparsecore());
  EXPECT_EQ(cluster->budgets().batch_bytes(), shares.budgets().batch_bytes());
  EXPECT_EQ(cluster->budgets().in_flight_bytes(), shares.budgets().in_flight_bytes());
  EXPECT_EQ(cluster->budgets().max_train_streams(), 512);
  EXPECT_EQ(cluster->budgets().client_requests(), 256);
  EXPECT_EQ(cluster->budgets().client_in_flight_bytes(), int64_t{4} << 30);
  EXPECT_EQ(cluster->budgets().connection_calls(), 1024);
  EXPECT_EQ(cluster->budgets().max_waiting_requests(), 1024);
  EXPECT_EQ(cluster->timeouts().batch_ttl_ms(), 120000);
  EXPECT_EQ(cluster->timeouts().shard_call_ms(), 30000);
  EXPECT_EQ(cluster->timeouts().drain_ms(), 10000);
  EXPECT_EQ(cluster->timeouts().silent_stream_ms(), 1'800'000);
  EXPECT_EQ(cluster->transport(), v1::ClusterConfig::AUTO);
  EXPECT_FALSE(cluster->share_with_any_user());
  EXPECT_EQ(cluster->logging().format(), v1::LoggingConfig::TEXT);
  EXPECT_EQ(cluster->logging().level(), v1::LoggingConfig::INFO);
  EXPECT_GE(cluster->shard_threads(), 1);
  EXPECT_GE(cluster->coordinator_threads(), 1);
}

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(FillBudgets, TakesSharesOfTheMemory) {
  v1::ClusterConfig cluster = *ParseCluster(
      "shards { address: 'a:1' } shards { address: 'a:2' } shards { address: 'b:1' } "
      "shards { address: 'b:2' } sparsecores_per_shard: 4");
  EXPECT_EQ(ShardsOnOneHost(cluster), 2);
  cluster.clear_budgets();
  FillBudgets(1536 * kMiB, &cluster);
  // Two shards of four share the half of a machine.
  EXPECT_EQ(cluster.budgets().bytes_per_sparsecore(), 96 * kMiB);
  EXPECT_EQ(cluster.budgets().batch_bytes(), 96 * kMiB);
  EXPECT_EQ(cluster.budgets().in_flight_bytes(), 192 * kMiB);
  EXPECT_EQ(cluster.budgets().shared_memory_bytes(), 192 * kMiB);
}

TEST(FillBudgets, GivesBatchesAndRequestsNoMoreOfALargeMachine) {
  v1::ClusterConfig cluster = *ParseCluster(kOneShard);
  cluster.clear_budgets();
  cluster.mutable_budgets()->set_bytes_per_sparsecore(7);
  FillBudgets(int64_t{1} << 40, &cluster);
  EXPECT_EQ(cluster.budgets().bytes_per_sparsecore(), 7);
  EXPECT_EQ(cluster.budgets().batch_bytes(), 1024 * kMiB);
  EXPECT_EQ(cluster.budgets().in_flight_bytes(), 4096 * kMiB);
}

TEST(FillBudgets, SharesTheCopiesOfASaveAmongTheShardsOfAMachine) {
  const auto copy_bytes = [](const char* shards, int64_t memory) {
    v1::ClusterConfig cluster =
        *ParseCluster(absl::StrCat(shards, " storage { directory: '/d' copy_bytes: 1 }"));
    cluster.mutable_storage()->clear_copy_bytes();
    FillBudgets(memory, &cluster);
    return cluster.storage().copy_bytes();
  };
  constexpr char kTwoShards[] = "shards { address: 'a:1' } shards { address: 'a:2' }";
  EXPECT_EQ(copy_bytes(kOneShard, 1536 * kMiB), 96 * kMiB);
  EXPECT_EQ(copy_bytes(kTwoShards, 1536 * kMiB), 48 * kMiB);
  EXPECT_EQ(copy_bytes(kTwoShards, int64_t{1} << 40), 1024 * kMiB);
  EXPECT_EQ(copy_bytes(kOneShard, kMiB), kMiB);
}

TEST(CompleteCluster, WithoutStorageThereIsNone) {
  EXPECT_FALSE(ParseCluster(kOneShard)->has_storage());
  EXPECT_FALSE(ParseCluster(kOneShard)->has_eviction());
}

TEST(CompleteCluster, WritesTheDefaultsOfStorage) {
  const auto cluster = ParseCluster(absl::StrCat(kOneShard, "storage { directory: '/data/' }"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const v1::StorageConfig& storage = cluster->storage();
  EXPECT_EQ(storage.directory(), "/data/");
  EXPECT_EQ(storage.checkpoints(), "/data/checkpoints");
  EXPECT_EQ(storage.durability(), v1::StorageConfig::MEMORY);
  EXPECT_EQ(storage.every_seconds(), 600);
  EXPECT_EQ(storage.every_steps(), 0);
  EXPECT_EQ(storage.keep(), 3);
  EXPECT_EQ(storage.max_chain(), 8);
  EXPECT_GE(storage.copy_bytes(), kMiB);
  EXPECT_LE(storage.copy_bytes(), 1024 * kMiB);
}

TEST(CompleteCluster, KeepsWhatIsGivenOfStorage) {
  const auto cluster = ParseCluster(absl::StrCat(
      kOneShard,
      "storage { directory: 'd' checkpoints: '/mnt/c' durability: CHECKPOINT every_seconds: 1 "
      "every_steps: 5 keep: 1 max_chain: -1 copy_bytes: 7 }"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const v1::StorageConfig& storage = cluster->storage();
  EXPECT_EQ(storage.checkpoints(), "/mnt/c");
  EXPECT_EQ(storage.durability(), v1::StorageConfig::CHECKPOINT);
  EXPECT_EQ(storage.every_seconds(), 1);
  EXPECT_EQ(storage.every_steps(), 5);
  EXPECT_EQ(storage.keep(), 1);
  EXPECT_EQ(storage.max_chain(), -1);
  EXPECT_EQ(storage.copy_bytes(), 7);
}

// `emberctl checkpoint prune` leaves so many, whatever the durability is now.
TEST(CompleteCluster, KeepsHowManyCheckpointsArePrunedTo) {
  const auto cluster = ParseCluster(
      absl::StrCat(kOneShard, "storage { directory: 'd' durability: MEMORY keep: 5 }"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->storage().keep(), 5);
}

TEST(CompleteCluster, KeepsWhatIsGivenOfALog) {
  const auto cluster =
      ParseCluster(absl::StrCat(kOneShard,
                                "storage { directory: 'd' durability: LOG "
                                "fsync_interval_ms: 5 log_bytes: 1048576 max_chain: 2 }"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->storage().fsync(), v1::StorageConfig::INTERVAL);
  EXPECT_EQ(cluster->storage().fsync_interval_ms(), 5);
  EXPECT_EQ(cluster->storage().log_bytes(), kMiB);
  EXPECT_EQ(cluster->storage().max_chain(), 2);
}

// The interval has its default there, once the description is complete, and is read again so.
TEST(CompleteCluster, KeepsThatEachChangeOfALogIsSynced) {
  const auto cluster = ParseCluster(absl::StrCat(
      kOneShard,
      "storage { directory: 'd' durability: LOG fsync: ALWAYS fsync_interval_ms: 1000 }"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->storage().fsync(), v1::StorageConfig::ALWAYS);
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
  for (const char* durability : {"MEMORY", "CHECKPOINT", "LOG every_seconds: 0"}) {
    auto cluster = ParseCluster(
        absl::StrCat(kOneShard, "storage { directory: 'd' durability: ", durability, " }"));
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    v1::ClusterConfig again = *cluster;
    ASSERT_TRUE(CompleteCluster(&again).ok());
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*cluster, again));
  }
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

// Every rule of a cluster description has a case here that breaks that rule alone.
constexpr char kGoodCluster[] = R"pb(
  shards { address: "h0:70" http_address: "h0:90" }
  shards { address: "h1:70" http_address: "h1:90" }
  sparsecores_per_shard: 2
  coordinators { address: "c:70" http_address: "c:90" }
  storage { directory: "/d" }
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
     "shards: a count of 3 is not allowed; it must be a power of two"},
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
     "budgets.bytes_per_sparsecore: -1 is not allowed; it must be in [0, 1125899906842624]"},
    {"NegativeBatchBudget", "coordinators", "budgets { batch_bytes: -1 } coordinators",
     "budgets.batch_bytes: -1 is not allowed"},
    {"NegativeBatches", "coordinators", "budgets { max_batches: -1 } coordinators",
     "budgets.max_batches: -1 is not allowed; it must be >= 1"},
    {"HugeMessages", "coordinators", "budgets { max_message_bytes: 2147483648 } coordinators",
     "budgets.max_message_bytes: 2147483648 is not allowed; it must be in [1, 2147483647]"},
    {"HugeInFlight", "coordinators",
     "budgets { in_flight_bytes: 9223372036854775807 } coordinators",
     "budgets.in_flight_bytes: 9223372036854775807 is not allowed"},
    {"NegativeSharedMemory", "coordinators", "budgets { shared_memory_bytes: -1 } coordinators",
     "budgets.shared_memory_bytes: -1 is not allowed"},
    {"UnknownTransport", "coordinators", "transport: 7 coordinators",
     "transport: 7 is not allowed; it must be one of AUTO, TCP"},
    {"NegativeTtl", "coordinators", "timeouts { batch_ttl_ms: -1 } coordinators",
     "timeouts.batch_ttl_ms: -1 is not allowed"},
    {"HugeDeadline", "coordinators", "timeouts { shard_call_ms: 2147483648 } coordinators",
     "timeouts.shard_call_ms: 2147483648 is not allowed"},
    {"NegativeSilence", "coordinators", "timeouts { silent_stream_ms: -1 } coordinators",
     "timeouts.silent_stream_ms: -1 is not allowed"},
    {"NegativeDrain", "coordinators", "timeouts { drain_ms: -10 } coordinators",
     "timeouts.drain_ms: -10 is not allowed"},
    {"UnknownFormat", "coordinators", "logging { format: 7 } coordinators",
     "logging.format: 7 is not allowed; it must be one of TEXT, JSON"},
    {"UnknownLevel", "coordinators", "logging { level: 7 } coordinators",
     "logging.level: 7 is not allowed; it must be one of DEBUG, INFO, WARNING, ERROR"},
    {"OneFileForLogAndSpans", "coordinators",
     "logging { file: '/v/log' span_file: '/v/log' } coordinators",
     "logging.span_file: \"/v/log\" is not allowed; it must be another than logging.file"},
    {"NoDirectory", "directory: \"/d\"", "",
     "storage.directory: empty; name the folder that emberd may write to"},
    {"NoSpillFolder", "coordinators", "eviction { host_bytes_per_sparsecore: 1 } coordinators",
     "eviction.spill_folder: empty; name a folder for the rows that leave memory"},
    {"NegativeSpill", "coordinators", "eviction { spill_folder: 'x' spill_bytes: -1 } coordinators",
     "eviction.spill_bytes: -1 is not allowed; it must be in [0, 1125899906842624]"},
    {"UnknownDurability", "directory", "durability: 7 directory",
     "storage.durability: 7 is not allowed; it must be one of MEMORY, CHECKPOINT"},
    {"NegativeSeconds", "directory", "every_seconds: -1 directory",
     "storage.every_seconds: -1 is not allowed; it must be in [1, 2147483647]"},
    {"NegativeSteps", "directory", "every_steps: -1 directory",
     "storage.every_steps: -1 is not allowed; it must be >= 0"},
    {"SecondsWithLog", "directory", "durability: LOG every_seconds: 2 directory",
     "storage.every_seconds: 2 would be ignored with durability LOG"},
    {"StepsWithLog", "directory", "durability: LOG every_steps: 50 directory",
     "storage.every_steps: 50 would be ignored with durability LOG"},
    {"KeepWithLog", "directory", "durability: LOG keep: 5 directory",
     "storage.keep: 5 would be ignored with durability LOG"},
    {"SecondsInMemory", "directory", "every_seconds: 2 directory",
     "storage.every_seconds: 2 would be ignored with durability MEMORY; remove it, or write "
     "durability: CHECKPOINT"},
    {"StepsInMemory", "directory", "durability: MEMORY every_steps: 50 directory",
     "storage.every_steps: 50 would be ignored with durability MEMORY"},
    {"FsyncInMemory", "directory", "fsync: ALWAYS directory",
     "storage.fsync: ALWAYS would be ignored with durability MEMORY; remove it, or write "
     "durability: LOG"},
    {"FsyncOfCheckpoints", "directory", "durability: CHECKPOINT fsync: NEVER directory",
     "storage.fsync: NEVER would be ignored with durability CHECKPOINT"},
    {"FsyncIntervalOfCheckpoints", "directory",
     "durability: CHECKPOINT fsync_interval_ms: 1 directory",
     "storage.fsync_interval_ms: 1 would be ignored with durability CHECKPOINT"},
    {"FsyncIntervalOfAlways", "directory",
     "durability: LOG fsync: ALWAYS fsync_interval_ms: 5 directory",
     "storage.fsync_interval_ms: 5 would be ignored with fsync ALWAYS; remove it, or write fsync: "
     "INTERVAL"},
    {"FsyncIntervalOfNever", "directory",
     "durability: LOG fsync: NEVER fsync_interval_ms: 5 directory",
     "storage.fsync_interval_ms: 5 would be ignored with fsync NEVER"},
    {"LogBytesOfCheckpoints", "directory", "durability: CHECKPOINT log_bytes: 1048576 directory",
     "storage.log_bytes: 1048576 would be ignored with durability CHECKPOINT"},
    {"NulInAPath", "/d", "/d\\000e",
     "storage.directory: \"/d\\000e\" is not allowed; it must be a text without NUL bytes"},
    {"NegativeKeep", "directory", "keep: -1 directory",
     "storage.keep: -1 is not allowed; it must be >= 1"},
    {"NegativeChain", "directory", "max_chain: -2 directory",
     "storage.max_chain: -2 is not allowed; it must be in [-1, 1000]"},
    {"LongChain", "directory", "max_chain: 1001 directory",
     "storage.max_chain: 1001 is not allowed"},
    {"NegativeCopies", "directory", "copy_bytes: -1 directory",
     "storage.copy_bytes: -1 is not allowed; it must be in [0, 1125899906842624]"},
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
            "shards: a count of 32 is not allowed; it must be at most 16 with 64 SparseCores per "
            "shard (1024 partitions)");
}

constexpr char kLoopback[] =
    "shards { address: '127.0.0.1:0' } coordinators { address: 'localhost:0' } ";
constexpr char kNetwork[] =
    "shards { address: '127.0.0.1:0' } "
    "coordinators { address: 'localhost:0' http_address: '0.0.0.0:90' } ";
constexpr char kTls[] = "tls { certificate_file: 'c' key_file: 'k' ca_file: 'a' } ";
constexpr char kTokens[] = "tokens_file: 't' cluster_token_file: 'u' ";

absl::Status Check(const std::string& cluster, const std::string& security) {
  return ParseCluster(absl::StrCat(cluster, "security { ", security, " }")).status();
}

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(CheckSecurity, TakesEachKindByItselfAndTogether) {
  for (const char* cluster : {kLoopback, kNetwork}) {
    EXPECT_TRUE(Check(cluster, "").ok());
    EXPECT_TRUE(Check(cluster, kTls).ok());
    EXPECT_TRUE(Check(cluster, absl::StrCat(kTls, kTokens)).ok());
  }
  EXPECT_TRUE(Check(kLoopback, kTokens).ok());
}

TEST(CheckSecurity, NamesTheFileThatIsMissing) {
  EXPECT_THAT(Error(Check(kLoopback, "tls { key_file: 'k' ca_file: 'a' }")),
              StartsWith("security.tls.certificate_file: empty; TLS needs"));
  EXPECT_THAT(Error(Check(kLoopback, "tls { certificate_file: 'c' ca_file: 'a' }")),
              StartsWith("security.tls.key_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tls { certificate_file: 'c' key_file: 'k' }")),
              StartsWith("security.tls.ca_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tls { require_client_certificate: true }")),
              StartsWith("security.tls.certificate_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tokens_file: 't'")),
              StartsWith("security.cluster_token_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "cluster_token_file: 't'")),
              StartsWith("security.tokens_file: empty; "));
}

// Such a port could be bound, but gRPC would hang up on everybody.
TEST(CheckSecurity, PlainTokensTakeOneLoopbackAddressOnly) {
  for (const char* host : {"127.0.0.1", "[::1]", "localhost", "LOCALHOST"}) {
    EXPECT_TRUE(Check(absl::StrCat("shards { address: '", host, ":1' } "), kTokens).ok()) << host;
  }
  EXPECT_THAT(Error(Check("shards { address: '127.8.8.8:1' } ", kTokens)),
              StartsWith("shards[0].address: \"127.8.8.8:1\" is not 127.0.0.1"));
}

TEST(CheckSecurity, TokensDoNotTravelInPlainTextThroughANetwork) {
  EXPECT_THAT(Error(Check(kNetwork, kTokens)),
              StartsWith("coordinators[0].http_address: \"0.0.0.0:90\" is not 127.0.0.1, [::1]"));
  EXPECT_THAT(Error(Check("shards { address: 'h:1' } ", kTokens)),
              StartsWith("shards[0].address: \"h:1\" is not 127.0.0.1"));
}

std::string Digest(char digit) { return std::string(64, digit); }

std::string Token(const std::string& name, const std::string& role, const std::string& digest) {
  return absl::StrCat("tokens { name: '", name, "' role: ", role, " sha256: '", digest, "' } ");
}

TEST(ParseTokenFile, TakesTextAndJson) {
  const auto text =
      ParseTokenFile(Token("a", "READER", Digest('A')) + Token("b", "CLUSTER", Digest('0')));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->tokens_size(), 2);
  EXPECT_EQ(text->tokens(0).sha256(), Digest('a'));
  const auto json = ParseTokenFile(absl::StrCat(
      R"({"tokens": [{"name": "a", "role": "ADMIN", "sha256": ")", Digest('1'), "\"}]}"));
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->tokens(0).role(), v1::Token::ADMIN);
}

TEST(ParseTokenFile, NamesTheFieldThatIsWrong) {
  const std::string good = Token("a", "READER", Digest('a'));
  const struct {
    std::string text;
    const char* error;
  } cases[] = {
      {"", "tokens: empty; at least one is needed"},
      {Token("", "READER", Digest('a')), "tokens[0].name: "},
      {Token("a b", "READER", Digest('a')), "tokens[0].name: \"a b\" is not allowed"},
      {Token(std::string(129, 'n'), "READER", Digest('a')), "tokens[0].name: "},
      {"tokens { name: 'a' sha256: '" + Digest('a') + "' }",
       "tokens[0].role: ROLE_UNSPECIFIED is not allowed; it must be one of READER, TRAINER"},
      {Token("a", "9", Digest('a')), "tokens[0].role: 9 is not allowed"},
      {good + Token("b", "ADMIN", Digest('a') + "a"),
       "tokens[1].sha256: a text of 65 characters is not allowed; it must be 64 hex digits"},
      {good + Token("b", "ADMIN", Digest('g')), "tokens[1].sha256: a text of 64 characters is not"},
      {good + Token("a", "ADMIN", Digest('b')),
       "tokens[1].name: \"a\" is not allowed; it must be unique; it is also tokens[0].name"},
      {good + Token("b", "ADMIN", Digest('A')),
       "tokens[1].sha256: the token is also that of tokens[0]"},
  };
  for (const auto& bad : cases) {
    EXPECT_THAT(Error(ParseTokenFile(bad.text).status()), StartsWith(bad.error)) << bad.text;
  }
}

// Whoever mistakes the field for the token itself must not find the token in a log.
TEST(ParseTokenFile, DoesNotRepeatWhatMayBeAToken) {
  EXPECT_THAT(Error(ParseTokenFile(Token("a", "READER", "s3cret")).status()),
              Not(HasSubstr("s3cret")));
  // The token's own file, taken for the list of digests.
  EXPECT_THAT(Error(ParseTokenFile("s3cret\n").status()), Not(HasSubstr("s3cret")));
}

TEST(LoadTokenFile, NamesTheFile) {
  const absl::Status status = LoadTokenFile("/nowhere/tokens").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), StartsWith("/nowhere/tokens: "));
}

}  // namespace cluster_test
}  // namespace emberd::config
