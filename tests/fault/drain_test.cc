// A coordinator that drains while others go on, with real processes. A failure here means that a
// trainer loses a step or makes it twice when its coordinator is taken out of service, that a step
// which had begun is cut off, that a coordinator cannot be put back, or that it does not stop.
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace drain_test {

using ::testing::HasSubstr;

class DrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cluster = Cluster::Start({.shards = 2,
                                   .sparsecores_per_shard = 4,
                                   .coordinators = 2,
                                   .config = "timeouts { drain_ms: 600000 }"});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = Connect(0);
    ASSERT_NE(client_, nullptr);
  }

  // A client of both coordinators that begins with `first`.
  std::unique_ptr<client::Client> Connect(int first) {
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(first), cluster_->address(1 - first)};
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  client::Model Declare(const client::ModelDescription& description) {
    auto model = client_->DeclareModel(description);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  }

  grpc::Status TryDrain(bool undo, v1::DrainResponse* response) {
    const Api api(cluster_->address(0));
    v1::DrainRequest request;
    request.set_undo(undo);
    return Call(&v1::AdminService::Stub::Drain, api, request, response);
  }

  v1::DrainResponse Drain(bool undo = false) {
    v1::DrainResponse response;
    const grpc::Status status = TryDrain(undo, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  // Waits until a coordinator says that it drains.
  bool AwaitDraining(int coordinator) {
    const Api api(cluster_->address(coordinator));
    return Eventually([&] {
      v1::GetStatusResponse response;
      grpc::ClientContext context;
      return api.admin->GetStatus(&context, {}, &response).ok() && response.draining();
    });
  }

  // The exit status of a coordinator that was told to stop.
  int AwaitEnd(int coordinator) {
    ChildProcess* const process = cluster_->coordinator_process(coordinator);
    EXPECT_TRUE(process->WaitFor(kPatience));
    return process->exit_status();
  }

  // Waits until nothing is left to do; what was left last.
  v1::DrainResponse WaitUntilDrained() {
    return Await([&] { return Drain(); },
                 [](const v1::DrainResponse& left) {
                   return left.in_flight_requests() + left.train_streams() + left.batches() == 0;
                 });
  }

  // All steps of one rank, on as many streams as it takes; the steps that the streams began with.
  absl::StatusOr<std::vector<int64_t>> TrainRank(const client::Model& model,
                                                 const client::TrainOptions& options, int first,
                                                 int64_t steps, const LookupObserver& saw) {
    std::unique_ptr<client::Client> client = Connect(first);
    std::vector<int64_t> begins;
    absl::Status status = absl::UnknownError("no time");
    for (const absl::Time until = absl::Now() + kPatience; absl::Now() < until;) {
      auto stream = client->Train(model, options);
      status = stream.status();
      if (stream.ok()) {
        begins.push_back((*stream)->next_step());
        status = RunSteps(**stream, options.rank, options.size, begins.back(), steps,
                          options.pipelined, saw);
        if (status.ok()) status = (*stream)->Finish();
      }
      if (status.ok()) return begins;
      if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) return status;
    }
    return status;
  }

  // Two ranks, one on each coordinator; the first is drained while rank 0 has step 10 in its hands.
  // The step that they went on with.
  int64_t TrainThroughADrain(const client::Model& model, client::TrainOptions options,
                             int64_t steps) {
    std::vector<absl::StatusOr<std::vector<int64_t>>> begins(2, absl::UnknownError(""));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank, options]() mutable {
        options.rank = rank;
        options.size = 2;
        begins[rank] = TrainRank(model, options, rank, steps, [&](const auto& found) {
          if (rank == 0 && found.step == 10) Drain();
        });
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const auto& rank : begins) {
      EXPECT_TRUE(rank.ok()) << rank.status();
      if (!rank.ok()) return -1;
      EXPECT_EQ(rank->front(), 0);
      EXPECT_EQ(rank->back(), begins[0]->back());
    }
    return begins[0]->back();
  }

  // The tables after `steps` of one trainer that nothing disturbs, but that half-closes its stream
  // at `pause` and goes on.
  std::string Reference(client::TrainOptions options, int64_t pause, int64_t steps) {
    const client::Model model = Declare(GroupModel("reference", 4));
    options.size = 1;
    for (const int64_t end : {pause, steps}) {
      auto begins = TrainRank(model, options, /*first=*/1, end, nullptr);
      if (!begins.ok()) return begins.status().ToString();
    }
    return Digest(*client_, model).value_or("no digest");
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(DrainTest, ATrainerGoesOnThroughTheOtherAndBack) {
  const client::Model model = Declare(MixedModel("mixed"));
  for (int step = 1; step <= 4; ++step) ASSERT_TRUE(TrainStep(*client_, model, step, 20).ok());

  const std::vector<OwnedIds> batch = MixedBatch(5, 20);
  auto found = client_->Lookup(model, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->batch.coordinator, 0);
  v1::DrainResponse left = Drain();
  EXPECT_TRUE(left.draining());
  EXPECT_EQ(left.batches(), 1);
  left = Drain();  // once more changes nothing
  EXPECT_TRUE(left.draining());
  EXPECT_EQ(left.batches(), 1);
  // What was begun is finished where it was begun.
  const auto gradients = MixedGradients(5, *found);
  const absl::Status applied =
      client_->ApplyGradients(model, found->batch, Gradients(*found, gradients)).status();
  EXPECT_TRUE(applied.ok()) << applied;
  left = WaitUntilDrained();
  EXPECT_EQ(left.batches(), 0);
  EXPECT_EQ(left.in_flight_requests(), 0);

  for (int step = 6; step <= 8; ++step) ASSERT_TRUE(TrainStep(*client_, model, step, 20).ok());
  found = client_->Lookup(model, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->batch.coordinator, 1);
  EXPECT_TRUE(client_->ReleaseBatch(model, found->batch).ok());

  EXPECT_FALSE(Drain(/*undo=*/true).draining());
  std::unique_ptr<client::Client> back = cluster_->Connect();  // of the first alone
  ASSERT_NE(back, nullptr);
  for (int step = 9; step <= 10; ++step) ASSERT_TRUE(TrainStep(*back, model, step, 20).ok());

  const client::Model reference = Declare(MixedModel("reference"));
  for (int step = 1; step <= 10; ++step) {
    ASSERT_TRUE(TrainStep(*client_, reference, step, 20).ok());
  }
  EXPECT_EQ(*Digest(*client_, model), *Digest(*client_, reference));
}

TEST_F(DrainTest, WhatIsNewIsRefused) {
  const client::Model model = Declare(MixedModel("mixed"));
  Drain();
  client::ClientOptions options = cluster_->client_options();
  options.max_attempts = 1;
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::vector<int64_t> ids = {1};
  const std::vector<OwnedIds> batch = MixedBatch(5, 20);
  const std::string table = model.tables.front().name;
  for (const absl::Status& status :
       {(*client)->Lookup(model, Features(batch)).status(),
        (*client)->DeclareModel(MixedModel("other")).status(),
        (*client)->DescribeModel("mixed").status(), (*client)->ReadRows(model, table, ids).status(),
        (*client)->ExportTable(model, table,
                               [](int64_t, auto, int64_t) { return absl::OkStatus(); }),
        (*client)->Train(model, {.group = "g"}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("coordinator is draining"));
  }
  EXPECT_TRUE((*client)->GetStatus().ok());
}

// The step whose ids were sent before the drain is finished; the next one is not begun.
TEST_F(DrainTest, AStreamFinishesTheStepsThatItHasBegun) {
  const client::Model model = Declare(GroupModel("m", 4));
  client::TrainOptions options{.group = "run", .rank = 0, .size = 1};
  auto stream = client_->Train(model, options);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto send_lookup = [&](int64_t step) {
    return (*stream)->SendLookup(step, MakeShare(step, 0, 1).Features());
  };
  ASSERT_TRUE(send_lookup(0).ok());
  ASSERT_TRUE((*stream)->ReceiveLookup().ok());
  ASSERT_TRUE(send_lookup(1).ok());
  // Until the server has taken it: lookups are counted when they are preprocessed.
  const Api api(cluster_->address(0));
  const auto batches = [&]() -> int64_t {
    v1::GetStatsResponse stats;
    grpc::ClientContext context;
    if (!api.admin->GetStats(&context, {}, &stats).ok() || stats.stacks_size() == 0) return -1;
    return stats.stacks(0).batches();
  };
  EXPECT_TRUE(Eventually([&] { return batches() == 2; }));
  EXPECT_EQ(Drain().train_streams(), 1);
  EXPECT_TRUE((*stream)->SendUpdate(0, {}).ok());
  const absl::Status first = (*stream)->ReceiveUpdate().status();
  EXPECT_TRUE(first.ok()) << first;
  const absl::Status second = (*stream)->ReceiveLookup().status();
  EXPECT_TRUE(second.ok()) << second;
  EXPECT_TRUE(send_lookup(2).ok());  // refused, but not before step 1 is done
  EXPECT_TRUE((*stream)->SendUpdate(1, {}).ok());
  const absl::Status refused = (*stream)->ReceiveLookup().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("coordinator is draining"));
  EXPECT_EQ(WaitUntilDrained().train_streams(), 0);

  stream = client_->Train(model, options);  // in vain, but it turns the client to the other
  if (!stream.ok()) stream = client_->Train(model, options);
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), 2);
}

// SIGTERM is as gentle, for a while, and cannot be undone.
TEST_F(DrainTest, AStoppingCoordinatorLetsTheStepEnd) {
  const client::Model model = Declare(GroupModel("m", 4));
  auto stream = client_->Train(model, {.group = "run", .rank = 0, .size = 1});
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE((*stream)->SendLookup(0, MakeShare(0, 0, 1).Features()).ok());
  ASSERT_TRUE((*stream)->ReceiveLookup().ok());
  cluster_->coordinator_process(0)->Signal(SIGTERM);
  ASSERT_TRUE(AwaitDraining(0));
  v1::DrainResponse response;
  const grpc::Status undo = TryDrain(/*undo=*/true, &response);
  EXPECT_EQ(undo.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << undo.error_message();
  EXPECT_THAT(undo.error_message(), HasSubstr("the coordinator is stopping"));
  ASSERT_TRUE((*stream)->SendUpdate(0, {}).ok());
  const absl::Status update = (*stream)->ReceiveUpdate().status();
  EXPECT_TRUE(update.ok()) << update;
  EXPECT_EQ(AwaitEnd(0), 0);
  // It ended when the step did: what is cut off after the whole patience has another message.
  const absl::Status ended = (*stream)->Finish();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("coordinator is draining"));

  stream = client_->Train(model, {.group = "run", .rank = 0, .size = 1});
  if (!stream.ok()) stream = client_->Train(model, {.group = "run", .rank = 0, .size = 1});
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), 1);
}

// A step that nobody ends does not hold the process up for long, and a second signal ends it.
TEST_F(DrainTest, AStoppingCoordinatorDoesNotWaitForEver) {
  const client::Model model = Declare(GroupModel("m", 4));
  std::unique_ptr<client::Client> other = Connect(1);
  ASSERT_NE(other, nullptr);
  std::vector<std::unique_ptr<client::TrainStream>> streams;
  for (client::Client* client : {client_.get(), other.get()}) {
    auto stream =
        client->Train(model, {.group = streams.empty() ? "a" : "b", .rank = 0, .size = 1});
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE((*stream)->SendLookup(0, MakeShare(0, 0, 1).Features()).ok());
    ASSERT_TRUE((*stream)->ReceiveLookup().ok());
    streams.push_back(*std::move(stream));
  }
  const absl::Time begin = absl::Now();
  cluster_->coordinator_process(0)->Signal(SIGTERM);
  EXPECT_EQ(AwaitEnd(0), 0);  // not at drain_ms, which is longer than this waits
  EXPECT_GE(absl::Now() - begin, absl::Seconds(4.5));
  EXPECT_EQ(streams[0]->Finish().code(), absl::StatusCode::kUnavailable);

  cluster_->coordinator_process(1)->Signal(SIGTERM);
  ASSERT_TRUE(AwaitDraining(1));
  cluster_->coordinator_process(1)->Signal(SIGTERM);
  EXPECT_EQ(AwaitEnd(1), 1);
}

TEST_F(DrainTest, AStreamBetweenStepsEndsAtOnce) {
  const client::Model model = Declare(GroupModel("m", 4));
  auto stream = client_->Train(model, {.group = "run", .rank = 0, .size = 1});
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE(RunSteps(**stream, 0, 1, 0, 3, /*pipelined=*/false).ok());
  Drain();
  EXPECT_EQ(WaitUntilDrained().train_streams(), 0);
  const absl::Status ended = (*stream)->Finish();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
}

TEST_F(DrainTest, ASynchronousGroupTrainsOnWithTheSameBits) {
  const client::Model model = Declare(GroupModel("m", 4));
  const client::TrainOptions options{.group = "run"};
  const int64_t pause = TrainThroughADrain(model, options, 25);
  EXPECT_GE(pause, 11);  // step 10 had begun
  EXPECT_LT(pause, 25);
  EXPECT_EQ(WaitUntilDrained().train_streams(), 0);
  EXPECT_EQ(*Digest(*client_, model), Reference(options, 10, 25));
}

// What a lookup sees depends on where a pipelined group paused, and on nothing else.
TEST_F(DrainTest, APipelinedGroupTrainsOn) {
  const client::Model model = Declare(GroupModel("m", 4));
  const client::TrainOptions options{.group = "run", .pipelined = true};
  const int64_t pause = TrainThroughADrain(model, options, 25);
  EXPECT_GE(pause, 8);
  EXPECT_LT(pause, 25);
  EXPECT_EQ(WaitUntilDrained().train_streams(), 0);
  EXPECT_EQ(*Digest(*client_, model), Reference(options, pause, 25));
}

// A coordinator that holds each checkpoint before it is one.
class DrainAndSaveTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(hold_).close();
    setenv("EMBERD_HOLD", hold_.c_str(), /*overwrite=*/1);
    auto cluster = Cluster::Start(
        {.config = absl::StrCat("storage { durability: MEMORY directory: '", folder_.path(), "' }"),
         .failpoints = {{"coordinator-0", "save.files_are_here=hold"}}});
    unsetenv("EMBERD_HOLD");
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    model_ = client_->DeclareModel(MixedModel("m")).value();
  }
  bool AwaitLeft(int in_flight_requests, int train_streams) {
    const Api api(cluster_->address());
    return Eventually([&] {
      v1::DrainResponse left;
      EXPECT_TRUE(Call(&v1::AdminService::Stub::Drain, api, v1::DrainRequest(), &left).ok());
      return left.in_flight_requests() == in_flight_requests &&
             left.train_streams() == train_streams;
    });
  }
  void LetGo() { std::filesystem::remove(hold_); }

  const TempDir folder_ = *TempDir::Create();
  const std::string hold_ = absl::StrCat(folder_.path(), "/hold");
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
};

// Would catch: "drained" while a checkpoint is being saved, which whoever ends the process then
// cuts off.
TEST_F(DrainAndSaveTest, ACheckpointThatIsBeingSavedIsLeft) {
  std::thread save([&] { EXPECT_TRUE(client_->SaveCheckpoint("m", {.name = "one"}).ok()); });
  EXPECT_TRUE(AwaitLeft(/*in_flight_requests=*/1, /*train_streams=*/0));
  LetGo();
  save.join();
  EXPECT_TRUE(AwaitLeft(0, 0));
}

// Would catch: the same of one that a stream has asked for, which ends before its checkpoint is
// there.
TEST_F(DrainAndSaveTest, ACheckpointThatAStreamHasAskedForIsLeft) {
  auto stream = client_->Train(model_, {.group = "g"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE((*stream)->SendLookup(0, Features(MixedBatch(1, 4))).ok());
  ASSERT_TRUE((*stream)->ReceiveLookup().ok());
  ASSERT_TRUE((*stream)->SendUpdate(0, {}, {.checkpoint = "one", .skip = true}).ok());
  ASSERT_TRUE((*stream)->ReceiveUpdate().ok());
  ASSERT_TRUE((*stream)->Finish().ok());
  EXPECT_TRUE(AwaitLeft(/*in_flight_requests=*/1, /*train_streams=*/0));
  LetGo();
  EXPECT_TRUE(AwaitLeft(0, 0));
}

}  // namespace drain_test
}  // namespace emberd::testing
