// A coordinator whose description puts shards in another order would read and overwrite rows of
// other ids, and nobody would notice. A failure here means that a shard lets it.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/rpc/local_peers.h"

namespace emberd::rpc {
namespace shard_place_test {

using ::testing::HasSubstr;

v1::ClusterConfig ClusterOf(const std::vector<std::string>& addresses, int sparsecores = 2) {
  std::string text = absl::StrCat("sparsecores_per_shard: ", sparsecores, "\n");
  for (const std::string& address : addresses) {
    absl::StrAppend(&text, "shards { address: '", address, "' }\n");
  }
  absl::StrAppend(&text, "coordinators { address: '127.0.0.1:7400' }");
  auto cluster = config::ParseCluster(text);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  return *cluster;
}

const std::vector<std::string> kAddresses = {"a:1", "b:1", "c:1", "d:1"};

// What shard `shard` of kAddresses says to a coordinator that has `theirs`.
absl::Status Check(const v1::ClusterConfig& theirs, int shard) {
  return ShardPlaceCheck(ClusterOf(kAddresses), shard)
      .CheckPlace(PlaceOf(theirs, shard).SerializeAsString());
}

TEST(ShardPlaceTest, TheSameDescriptionPasses) {
  for (int shard = 0; shard < 4; ++shard) {
    EXPECT_TRUE(Check(ClusterOf(kAddresses), shard).ok()) << shard;
  }
}

TEST(ShardPlaceTest, TheFirstDifferenceIsNamed) {
  const struct {
    v1::ClusterConfig theirs;
    int shard;
    const char* difference;
  } cases[] = {
      {ClusterOf(kAddresses, 4), 0,
       "the coordinator counts 4 SparseCores in a shard, but this process has 2"},
      {ClusterOf({"a:1", "b:1"}), 1,
       "the coordinator takes this process for shard 1 of 2, but it is shard 1 of 4"},
      {ClusterOf({"a:1", "c:1", "b:1", "d:1"}), 0,
       "shards[1].address is \"b:1\" in the cluster description of this process"},
      {ClusterOf({"a:1", "b:1", "c:1", "d:2"}), 2, "shards[3].address is \"d:1\""},
  };
  for (const auto& c : cases) {
    const absl::Status status = Check(c.theirs, c.shard);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << c.difference;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.difference));
    EXPECT_THAT(std::string(status.message()), HasSubstr("same cluster description"));
  }
}

TEST(ShardPlaceTest, AShardKnowsWhichOneItIs) {
  const absl::Status status =
      ShardPlaceCheck(ClusterOf(kAddresses), 1)
          .CheckPlace(PlaceOf(ClusterOf(kAddresses), 0).SerializeAsString());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("takes this process for shard 0 of 4, but it is shard 1 of 4"));
}

// Its own address may be that of another interface; ports that the system picks, and addresses that
// mean any machine, say nothing.
TEST(ShardPlaceTest, WhatCannotBeKnownIsNotCompared) {
  EXPECT_TRUE(Check(ClusterOf({"a:1", "b:1", "elsewhere:9", "d:1"}), 2).ok());
  EXPECT_TRUE(Check(ClusterOf({"a:1", "b:0", "c:1", "d:0"}), 2).ok());
  EXPECT_TRUE(Check(ClusterOf({"a:1", "0.0.0.0:7", "c:1", "d:1"}), 0).ok());
  EXPECT_TRUE(Check(ClusterOf({"A:1", "B:1", "C:1", "D:1"}), 0).ok());
}

TEST(ShardPlaceTest, ACallWithoutAPlaceIsRefused) {
  const ShardPlaceCheck check(ClusterOf(kAddresses), 0);
  for (const std::string& bytes :
       {std::string(), std::string("\xff\xff"), std::string("\x08\x01")}) {
    EXPECT_EQ(check.CheckPlace(bytes).code(), absl::StatusCode::kFailedPrecondition) << bytes;
  }
}

}  // namespace shard_place_test
}  // namespace emberd::rpc
