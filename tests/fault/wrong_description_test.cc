// A coordinator that was started with another cluster description than the shards. Rows lie where
// the order of the shards puts them, so a failure here means that it reads and overwrites the rows
// of other ids, and that nobody notices.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace wrong_description_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class WrongDescriptionTest : public ClusterFixture {
 protected:
  void SetUp() override { StartCluster({.shards = 2}, MixedModel("mixed")); }

  std::string Description(const std::vector<int>& shards, int sparsecores) const {
    std::string text = absl::StrCat("sparsecores_per_shard: ", sparsecores, "\n");
    for (const int shard : shards) {
      absl::StrAppend(&text, "shards { address: '", cluster_->shard_address(shard), "' }\n");
    }
    return absl::StrCat(text, "coordinators { address: '127.0.0.1:0' }\n");
  }

  // That nothing can be done through a coordinator with this description, and that each error says
  // `difference`.
  void ExpectRefused(const std::string& description, const std::string& difference) {
    const std::string before = TableDigest();
    const absl::StatusOr<int> stranger = cluster_->StartStranger(description);
    ASSERT_TRUE(stranger.ok()) << stranger.status();
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(*stranger)};
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    const absl::Status statuses[] = {(*client)->DeclareModel(MixedModel("mixed")).status(),
                                     (*client)->DeclareModel(MixedModel("another")).status(),
                                     (*client)->ReadRows(model_, "users", {0, 1, 2, 3}).status(),
                                     TrainStep(**client, model_, 1, 32),
                                     (*client)->Train(model_, {.group = "g"}).status()};
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(difference), HasSubstr("same cluster description")));
    }
    // A shard that is silent for a second, as on a busy machine, says nothing.
    const auto status =
        Await([&] { return (*client)->GetStatus(); },
              [](const auto& seen) {
                return seen.ok() &&
                       std::all_of(seen->shards.begin(), seen->shards.end(),
                                   [](const client::ShardStatus& shard) {
                                     return absl::StrContains(shard.error, "the coordinator");
                                   });
              });
    ASSERT_TRUE(status.ok()) << status.status();
    for (const client::ShardStatus& shard : status->shards) {
      EXPECT_FALSE(shard.reachable);
      EXPECT_THAT(shard.error, HasSubstr("the coordinator"));
    }
    EXPECT_THAT(cluster_->ShardLog(0), HasSubstr("refused a coordinator"));
    EXPECT_EQ(TableDigest(), before);
  }
};

TEST_F(WrongDescriptionTest, ShardsInAnotherOrder) {
  ASSERT_TRUE(TrainStep(*client_, model_, 0, 32).ok());
  // Each shard says so; which of them is heard first is open.
  ExpectRefused(Description({1, 0}, 2), " of 2, but it is shard ");
  EXPECT_TRUE(TrainStep(*client_, model_, 1, 32).ok());
}

TEST_F(WrongDescriptionTest, OtherSparseCores) {
  ExpectRefused(Description({0, 1}, 4), "counts 4 SparseCores in a shard, but this process has 2");
}

TEST_F(WrongDescriptionTest, FewerShards) {
  ExpectRefused(Description({0}, 2), "takes this process for shard 0 of 1, but it is shard 0 of 2");
}

// Shards that have started again know the addresses of the others, and so of which cluster they
// are.
TEST_F(WrongDescriptionTest, AShardOfAnotherCluster) {
  for (int shard = 0; shard < 2; ++shard) {
    cluster_->KillShard(shard);
    ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  const absl::StatusOr<int> stranger = cluster_->StartStranger(
      absl::StrCat("sparsecores_per_shard: 2 shards { address: '", cluster_->shard_address(0),
                   "' } shards { address: '127.0.0.1:9' } "
                   "coordinators { address: '127.0.0.1:0' }"));
  ASSERT_TRUE(stranger.ok()) << stranger.status();
  client::ClientOptions options = cluster_->client_options();
  options.addresses = {cluster_->address(*stranger)};
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const absl::Status status = (*client)->DeclareModel(MixedModel("mixed")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("shards[1].address is \"", cluster_->shard_address(1))));
}

}  // namespace wrong_description_test
}  // namespace emberd::testing
