// What a shard promises a coordinator: nothing changes before the decision, an undecided update
// leaves no trace, and an update is applied once.
#include "server/shard_host/shard_host.h"

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "config/config.h"
#include "preprocess/plan.h"
#include "preprocess/preprocessor.h"

namespace emberd::server {
namespace {

constexpr char kModel[] = R"(
  name: "m"
  tables { name: "t" vocabulary_size: 20 embedding_dim: 8 combiner: SUM
           optimizer { sgd {} learning_rate: 1 } initializer { row_id {} } }
  features { name: "f" table: "t" })";
constexpr char kCluster[] = R"(
  shards { address: "127.0.0.1:0" } sparsecores_per_shard: 2 shard_threads: 2
  budgets { batch_bytes: 100000 max_batches: 2 }
  coordinators { address: "127.0.0.1:0" })";

class ShardHostTest : public testing::Test {
 protected:
  ShardHostTest()
      : config_(*config::ParseModel(kModel)),
        plan_(*preprocess::MakePlan(config_, {.shards = 1, .sparsecores_per_shard = 2})),
        preprocessor_(*preprocess::Preprocessor::Create(&config_, &plan_, {})),
        host_(*ShardHost::Create(*config::ParseCluster(kCluster), 0, &metrics_)) {
    EXPECT_TRUE(host_->CreateModel(CreateRequest()).ok());
  }

  internal::v1::CreateModelRequest CreateRequest() {
    internal::v1::CreateModelRequest request;
    request.set_model_id(5);
    *request.mutable_config() = config_;
    request.set_shards(1);
    request.set_sparsecores_per_shard(2);
    request.set_plan_fingerprint(plan_.fingerprint);
    return request;
  }

  absl::StatusOr<GatherResult> Gather(uint64_t handle, absl::Duration ttl = absl::Hours(1)) {
    static const std::vector<int64_t> ids = {3, 4, 3};
    preprocess::FeatureInput input;
    input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 3};
    auto batch = preprocessor_->Run({input});
    EXPECT_TRUE(batch.ok()) << batch.status();
    absl::StatusOr<GatherResult> result = absl::UnknownError("");
    absl::Notification done;
    host_->Gather({5, handle, ttl, (*batch)->ShardView(0), *batch}, [&](auto gathered) {
      result = std::move(gathered);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::StatusOr<ShardHost::StagedApply> Stage(uint64_t handle, uint64_t sequence) {
    ApplyCommand command;
    command.model_id = 5;
    command.batch_handle = handle;
    command.incarnation = host_->incarnation();
    command.mutation = {"c", sequence, handle};
    command.input.stacks.push_back({0, gradients_, {}});
    absl::StatusOr<ShardHost::StagedApply> result = absl::UnknownError("");
    absl::Notification done;
    host_->Stage(std::move(command), [&](auto staged) {
      result = std::move(staged);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::StatusOr<int64_t> Commit(ShardHost::StagedApply staged) {
    absl::StatusOr<int64_t> result = absl::UnknownError("");
    absl::Notification done;
    host_->Commit(std::move(staged), [&](auto rows) {
      result = std::move(rows);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  float FirstColumnOf(int64_t id) {
    const preprocess::TablePlan& table = plan_.stacks[0].tables[0];
    const std::vector<int32_t> partitions = {static_cast<int32_t>((id + table.shard_rotation) % 2)};
    const std::vector<int64_t> rows = {id / 2 + table.row_offset};
    float value = 0;
    absl::Notification done;
    host_->ReadRows({5, 0, "", partitions, rows, 1}, absl::MakeSpan(&value, 1),
                    [&](const absl::Status& status) {
                      EXPECT_TRUE(status.ok()) << status;
                      done.Notify();
                    });
    done.WaitForNotification();
    return value;
  }

  ops::Metrics metrics_{"test"};
  const v1::ModelConfig config_;
  const preprocess::Plan plan_;
  const std::unique_ptr<preprocess::Preprocessor> preprocessor_;
  const std::unique_ptr<ShardHost> host_;
  const std::vector<float> gradients_ = std::vector<float>(3 * 8, 1.0f);  // three samples
};

TEST_F(ShardHostTest, NothingChangesBeforeTheDecision) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(FirstColumnOf(3), 3.0f);
  auto rows = Commit(*std::move(staged));
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(*rows, 2);
  EXPECT_EQ(FirstColumnOf(3), 1.0f) << "two samples with gradient 1";
  EXPECT_EQ(FirstColumnOf(4), 3.0f);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
}

TEST_F(ShardHostTest, ADiscardedUpdateLeavesNoTrace) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  host_->Discard(*std::move(staged));
  EXPECT_EQ(FirstColumnOf(3), 3.0f);
  auto again = Stage(1, 1);
  ASSERT_TRUE(again.ok()) << "batch and sequence are free again: " << again.status();
  EXPECT_TRUE(Commit(*std::move(again)).ok());
}

TEST_F(ShardHostTest, ACommittedUpdateIsReplayedNotRepeated) {
  ASSERT_TRUE(Gather(1).ok());
  ASSERT_TRUE(Commit(*Stage(1, 1)).ok());
  auto again = Stage(1, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->outcome().replayed);
  EXPECT_EQ(again->outcome().rows_updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 1.0f);
}

TEST_F(ShardHostTest, TwoUpdatesCannotHoldOneBatch) {
  ASSERT_TRUE(Gather(1).ok());
  auto staged = Stage(1, 1);
  ASSERT_TRUE(staged.ok());
  EXPECT_EQ(Stage(1, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Stage(1, 2).status().code(), absl::StatusCode::kUnavailable);
  host_->Discard(*std::move(staged));
}

TEST_F(ShardHostTest, RefusesGradientsThatDoNotFitTheBatch) {
  ASSERT_TRUE(Gather(1).ok());
  ApplyCommand command;
  command.model_id = 5;
  command.batch_handle = 1;
  command.incarnation = host_->incarnation();
  command.mutation = {"c", 1, 1};
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
  ASSERT_TRUE(Gather(1, absl::ZeroDuration()).ok());
  ASSERT_TRUE(Gather(2).ok());
  EXPECT_EQ(Gather(3).status().code(), absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < 600 && host_->GetStatus().batches() > 1; ++i)
    absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(host_->GetStatus().batches(), 1);
  EXPECT_EQ(Stage(1, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Gather(3).ok());
}

TEST_F(ShardHostTest, RefusesAnotherPlaceOrPlan) {
  auto request = CreateRequest();
  EXPECT_FALSE(host_->CreateModel(request)->created()) << "it is there already";
  request.set_shards(2);
  EXPECT_EQ(host_->CreateModel(request).status().code(), absl::StatusCode::kFailedPrecondition);
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
  EXPECT_TRUE(host_->DropModel(5).ok());
  EXPECT_EQ(host_->FindModel(request).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(host_->DropModel(5).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Gather(1).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace emberd::server
