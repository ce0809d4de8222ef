// Groups whose run is over are forgotten when somebody says so: then another begins under the name,
// with its own first step. What is at work stays, and nobody gets an old step for a new one.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/group_training.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace group_drop_test {

using ::testing::HasSubstr;

class GroupDropTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = 4,
                  .sparsecores_per_shard = 2,
                  .coordinators = 2,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(), "\" }")},
                 GroupModel("m", 0));
  }

  absl::Status TrainSteps(const client::TrainOptions& options, int64_t steps) {
    return TrainGroup(*cluster_, model_, options, 2, steps);
  }
  int64_t NextStep(client::TrainOptions options) {
    options.size = 1;
    auto stream = client_->Train(model_, options);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? (*stream)->next_step() : -1;
  }

  const TempDir storage_ = *TempDir::Create();
};

TEST_F(GroupDropTest, AGroupOfEveryKindBeginsAgain) {
  for (const auto consistency :
       {client::Consistency::kSync, client::Consistency::kAsync, client::Consistency::kBounded}) {
    const std::string name = absl::StrCat("run-", static_cast<int>(consistency));
    SCOPED_TRACE(name);
    const client::TrainOptions options{.group = name, .size = 2, .consistency = consistency};
    ASSERT_TRUE(TrainSteps(options, 3).ok());
    const auto dropped = client_->DropGroup("m", name);
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(*dropped);
    EXPECT_FALSE(*client_->DropGroup("m", name)) << "twice";
    auto stream =
        client_->Train(model_, {.group = name, .consistency = consistency, .first_step = 40});
    ASSERT_TRUE(stream.ok()) << stream.status();
    EXPECT_EQ((*stream)->next_step(), 40) << "with another size, too";
    EXPECT_GT((*stream)->generation(), 1u) << "numbers go on";
    const absl::Status status = RunSteps(**stream, 0, 1, 40, 42, /*pipelined=*/false);
    EXPECT_TRUE(status.ok()) << status;
  }
}

// What this would catch: ranks that leave only after their trainers have heard of the end. A moment
// later they are gone in any case, so many runs follow one another.
TEST_F(GroupDropTest, AnotherSizeMayFollowAtOnce) {
  for (const auto consistency :
       {client::Consistency::kSync, client::Consistency::kAsync, client::Consistency::kBounded}) {
    const std::string name = absl::StrCat("run-", static_cast<int>(consistency));
    for (int run = 0; run < 20; ++run) {
      const absl::Status status =
          TrainSteps({.group = name, .size = 1 + run % 2, .consistency = consistency}, /*steps=*/1);
      ASSERT_TRUE(status.ok()) << name << ", run " << run << ": " << status;
    }
  }
}

TEST_F(GroupDropTest, OthersStay) {
  ASSERT_TRUE(TrainSteps({.group = "run", .size = 2}, 3).ok());
  ASSERT_TRUE(TrainSteps({.group = "run-2", .size = 2}, 4).ok());
  ASSERT_TRUE(*client_->DropGroup("m", "run"));
  EXPECT_EQ(NextStep({.group = "run"}), 0);
  auto stream = client_->Train(model_, {.group = "run-2"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), 4);
}

TEST_F(GroupDropTest, RanksAtWorkAreLeftAlone) {
  for (const auto consistency :
       {client::Consistency::kSync, client::Consistency::kAsync, client::Consistency::kBounded}) {
    const std::string name = absl::StrCat("run-", static_cast<int>(consistency));
    SCOPED_TRACE(name);
    // Of a group that takes silence for an end after a second, in which it comes to be watched.
    auto stream = client_->Train(
        model_,
        {.group = name, .consistency = consistency, .step_timeout = absl::Milliseconds(100)});
    ASSERT_TRUE(stream.ok()) << stream.status();
    for (int64_t step = 0; step < 2; ++step) {
      absl::SleepFor(absl::Milliseconds(1100));
      const absl::Status refused = client_->DropGroup("m", name).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("some of its ranks are active"));
      const absl::Status status = RunSteps(**stream, 0, 1, step, step + 1, /*pipelined=*/false);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE((*stream)->Finish().ok());
    EXPECT_TRUE(*client_->DropGroup("m", name));
  }
}

// They cannot leave, and nobody waits until they have been silent for long.
TEST_F(GroupDropTest, RanksOfADeadCoordinatorAreNotAtWork) {
  std::vector<std::unique_ptr<client::Client>> clients;
  for (const int coordinator : {0, 1}) {
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(coordinator)};
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    clients.push_back(*std::move(client));
  }
  std::vector<std::unique_ptr<client::TrainStream>> streams;
  for (const auto consistency :
       {client::Consistency::kSync, client::Consistency::kAsync, client::Consistency::kBounded}) {
    const std::string name = absl::StrCat("run-", static_cast<int>(consistency));
    auto stream = clients[0]->Train(model_, {.group = name, .consistency = consistency});
    ASSERT_TRUE(stream.ok()) << stream.status();
    const absl::Status status = RunSteps(**stream, 0, 1, 0, 2, /*pipelined=*/false);
    ASSERT_TRUE(status.ok()) << status;
    streams.push_back(*std::move(stream));
  }
  cluster_->KillCoordinator(0);
  for (const char* name : {"run-0", "run-1", "run-2"}) {
    const auto dropped = Await([&] { return clients[1]->DropGroup("m", name); });
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(*dropped);
  }
}

TEST_F(GroupDropTest, SaysWhatItCannotDo) {
  EXPECT_EQ(client_->DropGroup("other", "run").status().code(), absl::StatusCode::kNotFound);
  const absl::Status name = client_->DropGroup("m", "run#0").status();
  EXPECT_EQ(name.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(name.message()), HasSubstr("group"));
  EXPECT_FALSE(*client_->DropGroup("m", "unknown"));
  ASSERT_TRUE(TrainSteps({.group = "run"}, 3).ok());
  for (const int shard : {0, 1, 2, 3}) {
    cluster_->SuspendShard(shard);
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(0)};
    options.deadline = absl::Seconds(2);
    auto hurried = client::Client::Connect(options);
    ASSERT_TRUE(hurried.ok()) << hurried.status();
    EXPECT_FALSE((*hurried)->DropGroup("m", "run").ok());
    // The coordinator may give up a moment after the client: until then the shard's answer would
    // count.
    EXPECT_TRUE(Eventually([&] {
      const std::string page = FetchMetrics(cluster_->http_address());
      return !page.empty() && MetricSum(page, "emberd_in_flight_requests") == 0;
    }));
    cluster_->ResumeShard(shard);
  }
  EXPECT_EQ(NextStep({.group = "run"}), 3) << "nothing has changed";
}

// What a checkpoint has seen is what counts: the group that was dropped before it, or only after
// it.
TEST_F(GroupDropTest, ACheckpointKnowsTheGroupsOfItsMoment) {
  const auto restore = [&](const std::string& name) {
    auto restored = client_->RestoreCheckpoint("m", {.name = name});
    ASSERT_TRUE(restored.ok()) << restored.status();
    auto described = client_->DescribeModel("m");
    ASSERT_TRUE(described.ok()) << described.status();
    model_ = *std::move(described);
  };
  ASSERT_TRUE(TrainSteps({.group = "run"}, 3).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("m", {.name = "with"}).ok());
  ASSERT_TRUE(*client_->DropGroup("m", "run"));
  ASSERT_TRUE(client_->SaveCheckpoint("m", {.name = "without"}).ok());
  restore("with");
  EXPECT_EQ(NextStep({.group = "run"}), 3);
  restore("without");
  EXPECT_EQ(NextStep({.group = "run"}), 0);
}

}  // namespace group_drop_test
}  // namespace emberd::testing
