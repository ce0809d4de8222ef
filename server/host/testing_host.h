// A shard with one small model, driven without a transport: what tests of this folder share.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "config/config.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/plan/plan.h"
#include "server/host/shard_host.h"

namespace emberd::host {

inline constexpr char kModel[] = R"(
  name: "m"
  tables { name: "t" vocabulary_size: 20 embedding_dim: 8 combiner: SUM
           optimizer { sgd {} learning_rate: 1 } initializer { row_id {} } }
  features { name: "f" table: "t" })";
inline constexpr char kCluster[] = R"(
  shards { address: "127.0.0.1:0" } sparsecores_per_shard: 2 shard_threads: 2
  budgets { batch_bytes: 100000 max_batches: 2 }
  coordinators { address: "127.0.0.1:0" })";

inline constexpr uint64_t kHistory = 17;

// Model 5, history 17: one table of row ids, SGD with learning rate 1. Every batch looks up ids 3,
// 4, 3 and every gradient is 1, so an update takes 2 from row 3 and 1 from row 4.
class TestHost : public testing::Test {
 protected:
  explicit TestHost(const char* cluster = kCluster)
      : config_(*config::ParseModel(kModel)),
        plan_(*preprocess::MakePlan(config_, {.shards = 1, .sparsecores_per_shard = 2})),
        preprocessor_(std::make_unique<preprocess::Preprocessor>(&config_, &plan_, nullptr)),
        host_(*ShardHost::Create(*config::ParseCluster(cluster), 0, &metrics_, &threads_)) {
    host_->WaitUntilReady();  // with a log
    EXPECT_TRUE(host_->CreateModel(CreateRequest()).ok());
    internal::v1::ServeModelRequest serve;
    serve.set_model_id(5);
    serve.set_history(kHistory);
    EXPECT_TRUE(host_->ServeModel(serve).ok());
  }

  internal::v1::CreateModelRequest CreateRequest() {
    internal::v1::CreateModelRequest request;
    request.set_model_id(5);
    *request.mutable_config() = config_;
    request.set_shards(1);
    request.set_sparsecores_per_shard(2);
    request.set_plan_fingerprint(plan_.fingerprint);
    request.set_history(kHistory);
    return request;
  }

  std::shared_ptr<const preprocess::PreprocessedBatch> Preprocess() {
    static const std::vector<int64_t> ids = {3, 4, 3};
    preprocess::FeatureInput input;
    input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 3};
    auto batch = preprocessor_->Run({input});
    EXPECT_TRUE(batch.ok()) << batch.status();
    return *batch;
  }

  // `feature_samples`: what the batch says about its features, if not one with three samples.
  absl::StatusOr<GatherResult> Gather(uint64_t handle, absl::Duration ttl = absl::Hours(1),
                                      const std::vector<int64_t>& feature_samples = {3}) {
    const auto batch = Preprocess();
    std::vector<preprocess::StackBatchView> stacks = batch->ShardView(0);
    stacks[0].feature_samples = feature_samples;
    return rpc::WaitForAnswer<absl::StatusOr<GatherResult>>([&](const auto& done) {
      host_->Gather({5, kHistory, handle, ttl, std::move(stacks), batch, 0, {}}, done);
    });
  }

  ApplyCommand Command(uint64_t handle) {
    ApplyCommand command;
    command.model_id = 5;
    command.batch_handle = handle;
    command.history = kHistory;
    command.input.stacks.push_back({0, gradients_, {}});
    return command;
  }

  absl::StatusOr<ShardHost::StagedApply> Stage(uint64_t handle, uint64_t sequence,
                                               uint64_t attempt = 1) {
    ApplyCommand command = Command(handle);
    command.mutation = {"c", sequence, UpdateTag(5)};
    command.attempt = attempt;
    return Stage(std::move(command));
  }
  absl::StatusOr<ShardHost::StagedApply> Stage(ApplyCommand command) {
    return rpc::WaitForAnswer<absl::StatusOr<ShardHost::StagedApply>>(
        [&](const auto& done) { host_->Stage(std::move(command), done); });
  }

  absl::StatusOr<RowCounts> Commit(ShardHost::StagedApply staged) {
    return rpc::WaitForAnswer<absl::StatusOr<RowCounts>>(
        [&](const auto& done) { host_->Commit(staged, done); });
  }

  float FirstColumnOf(int64_t id) {
    const preprocess::TablePlan& table = plan_.stacks[0].tables[0];
    const std::vector<int32_t> partitions = {static_cast<int32_t>((id + table.shard_rotation) % 2)};
    const std::vector<int64_t> rows = {id / 2 + table.row_offset};
    float value = 0;
    absl::Notification done;
    host_->ReadRows({5, 0, "", partitions, rows, 1, kHistory}, absl::MakeSpan(&value, 1),
                    [&](const absl::Status& status) {
                      EXPECT_TRUE(status.ok()) << status;
                      done.Notify();
                    });
    done.WaitForNotification();
    return value;
  }

  ops::Metrics metrics_{"test"};
  ThreadPools threads_{2};
  const v1::ModelConfig config_;
  const preprocess::Plan plan_;
  const std::unique_ptr<preprocess::Preprocessor> preprocessor_;
  const std::unique_ptr<ShardHost> host_;
  const std::vector<float> gradients_ = std::vector<float>(3 * 8, 1.0f);  // three samples
};

}  // namespace emberd::host
