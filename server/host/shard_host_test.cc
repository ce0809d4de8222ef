// What a shard promises a coordinator: nothing changes before the decision, an undecided update
// leaves no trace, and an update is applied once.
#include "server/host/shard_host.h"

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "server/host/shard_backend.h"
#include "server/host/testing_host.h"

namespace emberd {

// Set by a test: runs where an assignment has found its rows known, and does not have them yet.
std::function<void()> when_rows_are_known;

// Instead of that of base/failpoint.cc, which does nothing.
void ReachFailpoint(const char* name) {
  if (std::string(name) == "assign.rows_are_known" && when_rows_are_known) when_rows_are_known();
}

}  // namespace emberd

namespace emberd::host {
namespace shard_host_test {

using ShardHostTest = TestHost;

TEST_F(ShardHostTest, NothingChangesBeforeTheDecision) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(FirstColumnOf(3), 3.0f);
  auto rows = Commit(*std::move(staged));
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 1.0f) << "two samples with gradient 1";
  EXPECT_EQ(FirstColumnOf(4), 3.0f);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
}

TEST_F(ShardHostTest, ATinyGatherIsDoneOnItsCallersThread) {
  const auto batch = Preprocess();
  std::thread::id thread;
  absl::Notification done;
  std::vector<preprocess::StackBatchView> stacks = batch->ShardView(0);
  const std::vector<int64_t> feature_samples = {3};
  stacks[0].feature_samples = feature_samples;
  host_->Gather({5, kHistory, 0, absl::ZeroDuration(), std::move(stacks), batch, 0, {}},
                [&](const auto& result) {
                  EXPECT_TRUE(result.ok()) << result.status();
                  thread = std::this_thread::get_id();
                  done.Notify();
                });
  done.WaitForNotification();
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST_F(ShardHostTest, ADiscardedUpdateLeavesNoTrace) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  host_->Discard(*std::move(staged));
  EXPECT_EQ(FirstColumnOf(3), 3.0f);
  auto again = Stage(1, 1, 2);
  ASSERT_TRUE(again.ok()) << "batch and sequence are free again: " << again.status();
  EXPECT_TRUE(Commit(*std::move(again)).ok());
}

TEST_F(ShardHostTest, ACommittedUpdateIsReplayedNotRepeated) {
  ASSERT_TRUE(Gather(1).ok());
  ASSERT_TRUE(Commit(*Stage(1, 1)).ok());
  auto again = Stage(1, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->outcome.replayed);
  EXPECT_EQ(again->outcome.rows.updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 1.0f);
}

TEST_F(ShardHostTest, TwoUpdatesCannotHoldOneBatch) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok());
  EXPECT_EQ(Stage(1, 1, 2).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Stage(1, 2).status().code(), absl::StatusCode::kUnavailable);
  host_->Discard(*std::move(staged));
}

TEST_F(ShardHostTest, RefusesGradientsThatDoNotFitTheBatch) {
  ASSERT_TRUE(Gather(1).ok());
  ApplyCommand command;
  command.model_id = 5;
  command.batch_handle = 1;
  command.history = kHistory;
  command.mutation = {"c", 1, UpdateTag(5)};
  command.attempt = 1;
  command.input.stacks.push_back({0, absl::MakeConstSpan(gradients_).subspan(1), {}});
  absl::Notification done;
  absl::Status status;
  host_->Stage(std::move(command), [&](auto staged) {
    status = staged.status();
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(Stage(1, 1).ok()) << "the refusal left no trace";
}

TEST_F(ShardHostTest, BatchesExpireAndStayWithinTheirBudget) {
  ASSERT_TRUE(Gather(2).ok());
  ASSERT_TRUE(Gather(4).ok());
  EXPECT_EQ(Gather(3).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(host_->ReleaseBatch(5, 4).ok());
  ASSERT_TRUE(Gather(1, absl::ZeroDuration()).ok());
  EXPECT_TRUE(Eventually([&] { return host_->GetStatus().batches() == 1; }));
  EXPECT_EQ(Stage(1, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Gather(3).ok());
}

// What an update needs is kept only where other batches are not refused for it.
TEST_F(ShardHostTest, BatchesAreInOrderForUpdatesWhileThereIsPlentyOfRoom) {
  constexpr int64_t kSamples = 600;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < kSamples; ++i) ids.push_back(i % 20);
  const std::vector<float> gradients(kSamples * 8, 1.0f);
  std::vector<float> sums(kSamples * 8);  // in place, and so not as unique rows
  const auto gather = [&](uint64_t handle) {
    preprocess::FeatureInput input;
    input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, kSamples};
    const auto batch = *preprocessor_->Run({input});
    std::vector<preprocess::StackBatchView> stacks = batch->ShardView(0);
    const std::vector<int64_t> feature_samples = {kSamples};
    stacks[0].feature_samples = feature_samples;
    absl::Notification done;
    const int64_t before = host_->GetStatus().batch_bytes();
    GatherCommand command{5, kHistory, handle, absl::Hours(1), std::move(stacks), batch, 0, {}};
    command.places.stacks = {{0, {{sums.data(), 8, 8, 0, kSamples}}, {}}};
    host_->Gather(std::move(command), [&](const auto& result) {
      EXPECT_TRUE(result.ok()) << result.status();
      done.Notify();
    });
    done.WaitForNotification();
    return host_->GetStatus().batch_bytes() - before;
  };
  const int64_t first = gather(1);
  const int64_t second = gather(2);
  EXPECT_GE(first - second, kSamples * static_cast<int64_t>(sizeof(shard::Touch)));
  for (const uint64_t handle : {1, 2}) {
    ApplyCommand command = Command(handle);
    command.mutation = {"c", handle, UpdateTag(5)};
    command.attempt = 1;
    command.input.stacks[0].gradients = gradients;
    auto staged = Stage(std::move(command));
    ASSERT_TRUE(staged.ok()) << staged.status();
    ASSERT_TRUE(Commit(*std::move(staged)).ok());
    for (const int64_t id : {3, 4}) EXPECT_EQ(FirstColumnOf(id), id - 30.0f * handle);
  }
}

TEST_F(ShardHostTest, StatusShowsPartitionsMemoryAndHotRows) {
  ASSERT_TRUE(Gather(1).ok());
  ASSERT_TRUE(Commit(*Stage(1, 1)).ok());
  constexpr int kMore = 10000;  // one in 1024 lookups counts for the hot rows
  for (int i = 0; i < kMore; ++i) ASSERT_TRUE(Gather(0).ok());
  const v1::ShardStatus status = host_->GetStatus(1);
  EXPECT_EQ(status.rows_gathered(), 3 * (kMore + 1));
  EXPECT_EQ(status.rows_updated(), 2);
  ASSERT_EQ(status.partitions_size(), 2);
  int64_t bytes = 0, gathered = 0, updated = 0;
  for (int k = 0; k < 2; ++k) {
    EXPECT_EQ(status.partitions(k).index(), k);
    bytes += status.partitions(k).table_bytes();
    gathered += status.partitions(k).rows_gathered();
    updated += status.partitions(k).rows_updated();
  }
  EXPECT_EQ(bytes, status.table_bytes());
  EXPECT_EQ(gathered, status.rows_gathered());
  EXPECT_EQ(updated, status.rows_updated());
  EXPECT_GE(status.table_budget_bytes(), status.table_bytes());
  EXPECT_GT(status.resident_bytes(), status.table_bytes());
  EXPECT_EQ(status.queued(), 0);

  ASSERT_EQ(status.hot_rows_size(), 1);
  const v1::HotRow& hot = status.hot_rows(0);
  EXPECT_EQ(hot.model(), "m");
  EXPECT_EQ(hot.table(), "t");
  EXPECT_EQ(hot.id(), 3) << "two of three lookups";
  EXPECT_EQ(hot.error(), 0);
  EXPECT_GT(hot.lookups(), hot.table_lookups() / 3);
  EXPECT_LT(hot.lookups(), hot.table_lookups());
  EXPECT_EQ(host_->GetStatus(100).hot_rows_size(), 2);
  EXPECT_EQ(host_->GetStatus().hot_rows_size(), 0);
}

TEST_F(ShardHostTest, RefusesAnotherPlaceOrPlan) {
  auto request = CreateRequest();
  EXPECT_FALSE(host_->CreateModel(request)->created()) << "it is there already";
  request.set_shards(2);
  const absl::Status elsewhere = host_->CreateModel(request).status();
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(elsewhere.message()),
              ::testing::HasSubstr("all processes need one description"));
  request = CreateRequest();
  request.set_model_id(6);
  EXPECT_EQ(host_->CreateModel(request).status().code(), absl::StatusCode::kAlreadyExists);
  request.mutable_config()->set_name("other");
  request.set_plan_fingerprint(1);
  EXPECT_EQ(host_->CreateModel(request).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ShardHostTest, FindsModelsByIdAndByName) {
  internal::v1::FindModelRequest request;
  request.set_model_id(5);
  EXPECT_EQ(host_->FindModel(request)->config().name(), "m");
  request.set_model_id(0);
  request.set_name("m");
  EXPECT_EQ(host_->FindModel(request)->model_id(), 5u);
}

internal::v1::DropModelRequest Drop(uint64_t history, bool unless_serving = false) {
  internal::v1::DropModelRequest request;
  request.set_model_id(5);
  request.set_history(history);
  request.set_unless_serving(unless_serving);
  return request;
}

TEST_F(ShardHostTest, ADroppedModelIsGoneAndRemembered) {
  EXPECT_EQ(host_->DropModel(Drop(kHistory, true)).code(), absl::StatusCode::kFailedPrecondition)
      << "it is served";
  EXPECT_TRUE(host_->DropModel(Drop(99)).ok()) << "other rows than those that are here";
  EXPECT_TRUE(Gather(1).ok());
  EXPECT_TRUE(host_->DropModel(Drop(kHistory)).ok());
  EXPECT_TRUE(host_->DropModel(Drop(kHistory)).ok()) << "twice";
  EXPECT_EQ(Gather(1).status().code(), absl::StatusCode::kDataLoss);
  internal::v1::FindModelRequest find;
  find.set_model_id(5);
  EXPECT_EQ(host_->FindModel(find).status().code(), absl::StatusCode::kNotFound);
  const internal::v1::ListModelsResponse list = host_->ListModels();
  EXPECT_EQ(list.models_size(), 0);
  EXPECT_THAT(list.dropped(), ::testing::Contains(kHistory));
}

// A declaration that is given up must not come true when its words arrive in the wrong order.
TEST_F(ShardHostTest, WhatWasTakenBackIsNotMadeLater) {
  ASSERT_TRUE(host_->DropModel(Drop(kHistory)).ok());
  ASSERT_TRUE(host_->DropModel(Drop(18, /*unless_serving=*/true)).ok()) << "not here yet";
  auto request = CreateRequest();
  request.set_history(18);
  EXPECT_EQ(host_->CreateModel(request).status().code(), absl::StatusCode::kAborted);
  request.set_history(19);
  EXPECT_TRUE(host_->CreateModel(request).ok());
}

TEST_F(ShardHostTest, RowsOfAnotherHistoryAreNotTouched) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  ASSERT_TRUE(Gather(2).ok());

  // As a reset does it.
  auto request = CreateRequest();
  request.set_history(18);
  request.set_replaces(16);
  EXPECT_EQ(host_->CreateModel(request).status().code(), absl::StatusCode::kAborted);
  request.set_replaces(kHistory);
  EXPECT_TRUE(host_->CreateModel(request)->created());
  EXPECT_FALSE(host_->CreateModel(request)->created()) << "a retry";
  internal::v1::ServeModelRequest serve;
  serve.set_model_id(5);
  serve.set_history(kHistory);
  EXPECT_EQ(host_->ServeModel(serve).code(), absl::StatusCode::kAborted);
  serve.set_history(18);
  EXPECT_TRUE(host_->ServeModel(serve).ok());

  // What belongs to the rows before it comes to nothing.
  EXPECT_FALSE(Commit(*std::move(staged)).ok());
  EXPECT_EQ(Stage(2, 2).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Gather(3).status().code(), absl::StatusCode::kDataLoss);
}

// Would catch: a vote on another shard that is never decided, for this one has forgotten whether it
// made the change, so that the model can never be saved again.
TEST_F(ShardHostTest, ManyChangesOfAClientDoNotHideYoungOnes) {
  const std::vector<int32_t> partitions = {0};
  const std::vector<int64_t> rows = {0};
  const std::vector<float> values(8);
  for (uint64_t sequence = 1; sequence <= 1100; ++sequence) {
    AssignCommand command;
    command.rows = {5, 0, "", partitions, rows, 8, kHistory};
    command.values = values;
    command.mutation = {"c", sequence, 1};
    command.attempt = 1;
    const auto staged = rpc::WaitForAnswer<absl::StatusOr<bool>>(
        [&](const auto& done) { host_->StageAssign(command, done); });
    ASSERT_TRUE(staged.ok()) << staged.status();
    const auto made = rpc::WaitForAnswer<absl::StatusOr<RowCounts>>([&](const auto& done) {
      host_->DecideMutation(command.mutation, 1, /*commit=*/true, done);
    });
    ASSERT_TRUE(made.ok()) << made.status();
  }
  const auto found =
      rpc::WaitForAnswer<absl::StatusOr<MutationVotes::Found>>([&](const auto& done) {
        host_->FindMutation({"c", 1, 1}, 0, done);
      });
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->state, internal::v1::FindMutationResponse::COMMITTED);
}

// Would catch: an assignment that is refused, and yet changes rows that a reset has made, on the
// shard where the reset came in its middle.
TEST_F(ShardHostTest, AnAssignmentDoesNotReachTheRowsOfAReset) {
  const std::vector<int32_t> partitions = {0};
  const std::vector<int64_t> rows = {0};
  const std::vector<float> values(8, 50);
  const auto assign = [&](uint64_t sequence, uint64_t history) {
    AssignCommand command;
    command.rows = {5, 0, "", partitions, rows, 8, history};
    command.values = values;
    command.mutation = {"c", sequence, 1};
    command.attempt = 1;
    return rpc::WaitForAnswer<absl::StatusOr<bool>>(
        [&](const auto& done) { host_->StageAssign(command, done); });
  };
  when_rows_are_known = [&] {
    when_rows_are_known = nullptr;
    auto request = CreateRequest();
    request.set_history(18);
    request.set_replaces(kHistory);
    EXPECT_TRUE(host_->CreateModel(request).ok());
    internal::v1::ServeModelRequest serve;
    serve.set_model_id(5);
    serve.set_history(18);
    EXPECT_TRUE(host_->ServeModel(serve).ok());
  };
  const auto staged = assign(1, kHistory);
  EXPECT_TRUE(absl::IsDataLoss(staged.status())) << staged.status();
  const auto with_new_rows = assign(2, 18);
  EXPECT_TRUE(with_new_rows.ok()) << with_new_rows.status();
}

// Filling tables may take seconds, in which other models are trained.
TEST(HostedModelsTest, CreatingAModelHoldsNobodyUp) {
  ops::Metrics metrics("test");
  ThreadPools threads(2);
  auto host = ShardHost::Create(*config::ParseCluster(kCluster), 0, &metrics, &threads);
  ASSERT_TRUE(host.ok()) << host.status();
  // `tables` of 64 MB each, in stacks of their own, which are filled when they are made.
  const auto request = [](const std::string& name, uint64_t id, int tables) {
    std::string text = absl::StrCat("name: '", name, "'");
    for (int t = 0; t < tables; ++t) {
      absl::StrAppend(&text, " tables { name: 't", t,
                      "' vocabulary_size: 250000 embedding_dim: 64 ",
                      "optimizer { learning_rate: 0.", t + 1, " sgd {} } } features { name: 'f", t,
                      "' table: 't", t, "' }");
    }
    internal::v1::CreateModelRequest create;
    create.set_model_id(id);
    *create.mutable_config() = *config::ParseModel(text);
    create.set_shards(1);
    create.set_sparsecores_per_shard(2);
    create.set_plan_fingerprint(
        preprocess::MakePlan(create.config(), {.shards = 1, .sparsecores_per_shard = 2})
            ->fingerprint);
    create.set_history(id);
    return create;
  };
  ASSERT_TRUE((*host)->CreateModel(request("first", 1, 1)).ok());
  std::atomic<bool> started = false, created = false;
  std::thread creator([&] {
    const auto large = request("large", 2, 8);
    started = true;
    EXPECT_TRUE((*host)->CreateModel(large).ok());
    created = true;
  });
  while (!started) std::this_thread::yield();
  // Each of these takes the lock that every gather takes.
  int answers = 0;
  while (!created) answers += (*host)->ListModels().models_size() == 1;
  creator.join();
  EXPECT_GT(answers, 10) << "the shard answered nothing until the tables were full";
  EXPECT_EQ((*host)->ListModels().models_size(), 2);
}

TEST(LocalShardTest, WhoIsStoppedDoesNotWaitForTheLog) {
  const TempDir storage = *TempDir::Create();
  const v1::ClusterConfig cluster = *config::ParseCluster(
      absl::StrCat(kCluster, " storage { directory: '", storage.path(), "' durability: LOG }"));
  ops::Metrics metrics("test");
  ThreadPools threads(2);
  const auto stopped = MakeLocalShard(cluster, 0, &metrics, &threads, [] { return true; });
  EXPECT_TRUE(absl::IsCancelled(stopped.status())) << stopped.status();
  EXPECT_TRUE(MakeLocalShard(cluster, 0, &metrics, &threads).ok()) << "it holds the folder";
}

}  // namespace shard_host_test
}  // namespace emberd::host
