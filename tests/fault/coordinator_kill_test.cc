// Coordinators hold no model state, so that a client can turn from one that died to another, and
// one that returns knows everything again. A failure here means that something lives in one
// coordinator only that should not.
#include <memory>
#include <string>
#include <vector>

#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace coordinator_kill_test {

class CoordinatorKillTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start({.coordinators = 2});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    absl::StatusOr<std::unique_ptr<client::Client>> client =
        client::Client::Connect(cluster_->client_options(/*all_coordinators=*/true));
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    absl::StatusOr<client::Model> model = client_->DeclareModel(MixedModel("mixed"));
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    ASSERT_TRUE(TrainStep(*client_, model_, 1, 20).ok());
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
};

TEST_F(CoordinatorKillTest, TheClientTurnsToAnother) {
  absl::StatusOr<std::string> before = Digest(*client_, model_);
  ASSERT_TRUE(before.ok()) << before.status();
  cluster_->KillCoordinator(0);
  // The other one has never heard of the model; the shards have.
  absl::StatusOr<std::string> after = Digest(*client_, model_);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(*after, *before);
  const absl::Status status = TrainStep(*client_, model_, 2, 20);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_NE(*Digest(*client_, model_), *before);
}

// A coordinator whose machine is gone refuses nothing: nobody answers. The client must not take its
// deadline to find out.
TEST_F(CoordinatorKillTest, TheClientTurnsFromOneThatFellSilent) {
  client::ClientOptions options = cluster_->client_options(/*all_coordinators=*/true);
  options.deadline = absl::Minutes(3);
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(TrainStep(**client, model_, 2, 20).ok());
  absl::StatusOr<std::string> before = Digest(**client, model_);
  ASSERT_TRUE(before.ok()) << before.status();
  cluster_->SuspendCoordinator(0);
  absl::StatusOr<std::string> after = Digest(**client, model_);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(*after, *before);
  const absl::Status status = TrainStep(**client, model_, 3, 20);
  EXPECT_TRUE(status.ok()) << status;
}

// A batch lives in its coordinator. It is gone with it, and the client is told so instead of
// waiting.
TEST_F(CoordinatorKillTest, ABatchDiesWithItsCoordinator) {
  const std::vector<OwnedIds> batch = MixedBatch(3, 20);
  absl::StatusOr<client::LookupResult> found = client_->Lookup(model_, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  const std::vector<std::vector<float>> gradients = MixedGradients(3, *found);
  absl::StatusOr<std::string> before = Digest(*client_, model_);
  cluster_->KillCoordinator(found->batch.coordinator);
  client::ApplyOptions options;
  options.deadline = kPatience;  // the tries end long before
  const std::vector<client::FeatureGradient> sent = Gradients(*found, gradients);
  EXPECT_EQ(client_->ApplyGradients(model_, found->batch, sent, options).status().code(),
            absl::StatusCode::kUnavailable);
  ASSERT_TRUE(cluster_->RestartCoordinator(found->batch.coordinator).ok());
  const absl::Status gone = client_->ApplyGradients(model_, found->batch, sent, options).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
  EXPECT_EQ(*Digest(*client_, model_), *before);
}

TEST_F(CoordinatorKillTest, OneThatReturnsKnowsTheModels) {
  absl::StatusOr<std::string> before = Digest(*client_, model_);
  ASSERT_TRUE(before.ok()) << before.status();
  cluster_->KillCoordinator(0);
  cluster_->KillCoordinator(1);
  ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
  std::unique_ptr<client::Client> client = cluster_->Connect();
  ASSERT_NE(client, nullptr);
  absl::StatusOr<client::Model> model = client->DeclareModel(MixedModel("mixed"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->id, model_.id);
  EXPECT_EQ(*Digest(*client, *model), *before);
  EXPECT_TRUE(TrainStep(*client, *model, 4, 20).ok());
}

}  // namespace coordinator_kill_test
}  // namespace emberd::testing
