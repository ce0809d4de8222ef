// Shards read gradients where the trainer has put them, until the update is made. If its
// coordinator dies in between, another one makes it later or drops it; the trainer, which knows
// only that its update has failed, may put the next gradients there at once. Were the shards to see
// those, one would apply the old gradients and the other the new ones.
//
// Covers: client/cpp/shared_memory.cc
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {
namespace in_place_fault_test {

constexpr int64_t kRows = 64;
constexpr int kDim = 8;  // a whole row of the stack, so that nothing has to be padded

struct Window {
  const char* failpoint;
  int64_t next_step;  // where the group goes on
};

class InPlaceTest : public ::testing::Test {
 protected:
  // With two coordinators.
  void Start(const ClusterOptions& cluster_options) {
    auto cluster = Cluster::Start(cluster_options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(0), cluster_->address(1)};
    options.transport = client::TransportKind::kShared;
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto model = client_->DeclareModel(absl::StrCat(
        "name: 'm' optimizer { sgd {} learning_rate: 1 } tables { name: 't' vocabulary_size: ",
        kRows, " embedding_dim: ", kDim, " initializer { constant { value: 0 } } combiner: SUM } ",
        "features { name: 'f' table: 't' }"));
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    for (int64_t id = 0; id < kRows; ++id) ids_.push_back(id);
  }

  std::unique_ptr<client::TrainStream> Join(int coordinator) {
    auto stream =
        Await([&] { return client_->Train(model_, {.group = "run", .coordinator = coordinator}); });
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }
  // Every row gains 1, unless the update fails.
  absl::Status Step(client::TrainStream& stream, int64_t step, float* gradients,
                    const std::shared_ptr<const void>& memory) {
    const std::vector<client::FeatureIds> features = {
        {"f", client::DenseIds{absl::MakeConstSpan(ids_)}}};
    absl::Status status = stream.SendLookup(step, features);
    if (!status.ok()) return status;
    if (auto found = stream.ReceiveLookup(); !found.ok()) return found.status();
    std::fill_n(gradients, kRows * kDim, -1.0f);
    const std::vector<client::FeatureGradient> given = {
        {"f", absl::MakeConstSpan(gradients, kRows * kDim), kRows}};
    status = stream.SendUpdate(step, given, {.memory = memory});
    if (!status.ok()) return status;
    return stream.ReceiveUpdate().status();
  }
  std::vector<float> Table() {
    auto rows = client_->ReadRows(model_, "t", ids_);
    EXPECT_TRUE(rows.ok()) << rows.status();
    return rows.ok() ? std::vector<float>(rows->values.begin(), rows->values.end())
                     : std::vector<float>();
  }

  const TempDir storage_ = *TempDir::Create();  // goes after the cluster
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
  std::vector<int64_t> ids_;
};

class InPlaceFaultTest : public InPlaceTest, public ::testing::WithParamInterface<Window> {
 protected:
  void SetUp() override {
    Start(
        {.shards = 2, .coordinators = 2, .failpoints = {{"coordinator-0", GetParam().failpoint}}});
  }
};

INSTANTIATE_TEST_SUITE_P(Windows, InPlaceFaultTest,
                         ::testing::Values(Window{"update.votes_are_in=die@2", 1},
                                           Window{"update.word_is_said=die:300@3", 2},
                                           Window{"update.word_is_said=die:300@4", 2},
                                           Window{"update.is_made=die@2", 2}));

TEST_P(InPlaceFaultTest, WhatATrainerWritesAfterAFailureIsNotApplied) {
  auto stream = Join(0);
  ASSERT_NE(stream, nullptr);
  const std::shared_ptr<float> gradients = stream->AllocateGradients(kRows * kDim);
  ASSERT_TRUE(Step(*stream, 0, gradients.get(), gradients).ok());
  ASSERT_FALSE(Step(*stream, 1, gradients.get(), gradients).ok()) << "its coordinator dies";
  std::fill_n(gradients.get(), kRows * kDim, -1000.0f);
  stream = Join(1);
  ASSERT_NE(stream, nullptr);
  ASSERT_EQ(stream->next_step(), GetParam().next_step);
  EXPECT_THAT(Table(), ::testing::Each(static_cast<float>(GetParam().next_step)));
  // The memory is the trainer's still, though it is shared with nobody.
  EXPECT_EQ(gradients.get()[0], -1000.0f);
  for (int64_t step = stream->next_step(); step < 4; ++step) {
    ASSERT_TRUE(Step(*stream, step, gradients.get(), gradients).ok());
  }
  EXPECT_THAT(Table(), ::testing::Each(4.0f));
}

// The description of the coordinators says nothing of a log, so that they name places where a log
// needs the gradients themselves.
TEST_F(InPlaceTest, AShardWithALogIsSentTheGradients) {
  Start({.shards = 2,
         .coordinators = 2,
         .shard_config =
             absl::StrCat("storage { directory: '", storage_.path(), "' durability: LOG }")});
  auto stream = Join(0);
  ASSERT_NE(stream, nullptr);
  const std::shared_ptr<float> gradients = stream->AllocateGradients(kRows * kDim);
  for (const int64_t step : {0, 1}) {
    const absl::Status status = Step(*stream, step, gradients.get(), gradients);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_THAT(Table(), ::testing::Each(2.0f));
  for (const int shard : {0, 1}) EXPECT_TRUE(cluster_->shard_process(shard)->Running());
}

}  // namespace in_place_fault_test
}  // namespace emberd::testing
