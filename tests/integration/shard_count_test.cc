// Determinism over the layout of the cluster: for a fixed number of partitions the same requests
// give the same bits, however many processes hold them. A failure here means that a sum was taken
// in an order that depends on the number of shards (activations combined shard by shard instead of
// by the tree, gradients summed per shard), that placement or initial values depend on the shard,
// or that stacking does.
#include <map>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace shard_count_test {

constexpr int kPartitions = 8;
constexpr int kSteps = 30;
constexpr int64_t kSamples = 37;  // divides into nothing

// Digests after a few steps and at the end, so that a failure tells early from late.
std::map<int, std::string> TrainOn(const ClusterOptions& options) {
  std::map<int, std::string> digests;
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start(options);
  if (!cluster.ok()) {
    ADD_FAILURE() << cluster.status();
    return digests;
  }
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  if (client == nullptr) return digests;
  absl::StatusOr<client::Model> model = client->DeclareModel(MixedModel("mixed"));
  if (!model.ok()) {
    ADD_FAILURE() << model.status();
    return digests;
  }
  EXPECT_EQ(model->shards * model->sparsecores_per_shard, kPartitions);
  EXPECT_EQ(model->stacks.size(), 3u);
  for (int step = 0; step <= kSteps; ++step) {
    if (step == 0 || step == 1 || step == kSteps) {
      absl::StatusOr<std::string> digest = Digest(*client, *model);
      EXPECT_TRUE(digest.ok()) << digest.status();
      digests[step] = digest.value_or("none");
    }
    if (step == kSteps) break;
    const absl::Status status = TrainStep(*client, *model, step, kSamples);
    if (!status.ok()) {
      ADD_FAILURE() << "step " << step << ": " << status;
      return digests;
    }
  }
  return digests;
}

TEST(ShardCountTest, TablesAreTheSameBitsForOneTwoAndFourShards) {
  const std::map<int, std::string> one = TrainOn({.shards = 1, .sparsecores_per_shard = 8});
  ASSERT_EQ(one.size(), 3u);
  EXPECT_NE(one.at(0), one.at(1));
  EXPECT_NE(one.at(1), one.at(kSteps));
  EXPECT_EQ(TrainOn({.shards = 2, .sparsecores_per_shard = 4}), one);
  EXPECT_EQ(TrainOn({.shards = 4, .sparsecores_per_shard = 2}), one);
  EXPECT_EQ(TrainOn({.shards = 8, .sparsecores_per_shard = 1}), one);
}

TEST(ShardCountTest, OneProcessGivesTheSameBitsAsMany) {
  const std::map<int, std::string> processes = TrainOn({.shards = 2, .sparsecores_per_shard = 4});
  ASSERT_EQ(processes.size(), 3u);
  EXPECT_EQ(TrainOn({.shards = 2, .sparsecores_per_shard = 4, .embedded = true}), processes);
  EXPECT_EQ(TrainOn({.shards = 4, .sparsecores_per_shard = 2, .embedded = true}), processes);
}

TEST(ShardCountTest, ThreadsDoNotMatter) {
  const std::map<int, std::string> one =
      TrainOn({.sparsecores_per_shard = 4, .config = "shard_threads: 1 coordinator_threads: 1"});
  ASSERT_EQ(one.size(), 3u);
  EXPECT_EQ(
      TrainOn({.sparsecores_per_shard = 4, .config = "shard_threads: 3 coordinator_threads: 5"}),
      one);
}

}  // namespace shard_count_test
}  // namespace emberd::testing
