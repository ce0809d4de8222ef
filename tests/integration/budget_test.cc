// Memory has a budget. A failure here means that forgotten batches pile up, or that a cluster over
// its budget fails in another way than by saying how much was needed.
#include <memory>
#include <string>
#include <vector>

#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace budget_test {

using ::testing::HasSubstr;

struct Trained {
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<client::Client> client;
  client::Model model;
};

Trained StartWith(const std::string& config) {
  Trained trained;
  absl::StatusOr<std::unique_ptr<Cluster>> cluster =
      Cluster::Start({.shards = 2, .config = config});
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return trained;
  trained.cluster = *std::move(cluster);
  trained.client = trained.cluster->Connect();
  absl::StatusOr<client::Model> model = trained.client->DeclareModel(MixedModel("mixed"));
  EXPECT_TRUE(model.ok()) << model.status();
  trained.model = model.value_or(client::Model());
  return trained;
}

absl::StatusOr<client::LookupResult> Lookup(Trained& trained, int64_t samples) {
  const std::vector<OwnedIds> batch = MixedBatch(1, samples);
  return trained.client->Lookup(trained.model, Features(batch));
}

// Batches that coordinator and shards keep.
int Batches(Trained& trained) {
  absl::StatusOr<client::ClusterStatus> status = trained.client->GetStatus();
  EXPECT_TRUE(status.ok()) << status.status();
  if (!status.ok()) return -1;
  int batches = status->batches;
  for (const client::ShardStatus& shard : status->shards) batches += shard.batches;
  return batches;
}

TEST(BudgetTest, AbandonedBatchesExpire) {
  Trained trained = StartWith("timeouts { batch_ttl_ms: 12000 }");
  absl::StatusOr<client::LookupResult> found = Lookup(trained, 20);
  ASSERT_TRUE(found.ok()) << found.status();
  // A shard that is too busy to answer the coordinator in a second does not count.
  const auto batches = [&] { return Batches(trained); };
  EXPECT_EQ(Await(batches, [](int count) { return count == 3; }), 3);
  EXPECT_TRUE(Eventually([&] { return Batches(trained) == 0; }));
  const absl::Status status =
      trained.client->ApplyGradients(trained.model, found->batch, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_TRUE(TrainStep(*trained.client, trained.model, 1, 20).ok());
}

TEST(BudgetTest, BatchesOverTheBudgetAreRefusedUntilOthersGo) {
  Trained trained = StartWith("budgets { batch_bytes: 200000 }");
  std::vector<client::BatchHandle> batches;
  absl::Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    absl::StatusOr<client::LookupResult> found = Lookup(trained, 100);
    status = found.status();
    if (found.ok()) batches.push_back(found->batch);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("200000"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("batch_bytes"));
  ASSERT_GT(batches.size(), 1u);
  // What was kept is still good, and what was refused has left nothing on a shard.
  const int kept = 3 * static_cast<int>(batches.size());
  EXPECT_EQ(Await([&] { return Batches(trained); }, [&](int count) { return count == kept; }),
            kept);
  EXPECT_TRUE(trained.client->ApplyGradients(trained.model, batches.back(), {}).ok());
  batches.pop_back();
  EXPECT_TRUE(TrainStep(*trained.client, trained.model, 1, 20).ok());
  for (const client::BatchHandle& batch : batches) {
    EXPECT_TRUE(trained.client->ReleaseBatch(trained.model, batch).ok());
  }
  EXPECT_TRUE(Eventually([&] { return Batches(trained) == 0; }));
}

TEST(BudgetTest, TablesOverTheBudgetAreRefusedWithTheFigure) {
  Trained trained = StartWith("budgets { bytes_per_sparsecore: 1000000 }");
  client::ModelDescription large = MixedModel("large");
  large.tables[0].vocabulary_size = 1'000'000;
  const absl::Status status = trained.client->DeclareModel(large).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("1000000"));
  // Nothing of it stays: the same name can be declared smaller.
  absl::StatusOr<client::Model> small = trained.client->DeclareModel(MixedModel("large"));
  EXPECT_TRUE(small.ok()) << small.status();
}

}  // namespace budget_test
}  // namespace emberd::testing
