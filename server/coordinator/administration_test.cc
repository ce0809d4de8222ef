// GetStats is what emberctl and the status page show: these tests catch figures that stay 0, count
// twice, or name things otherwise than the metrics do.
#include "server/coordinator/administration.h"

#include <cmath>

#include <gmock/gmock.h>
#include <google/protobuf/empty.pb.h>
#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "config/config.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/coordinator_server.h"
#include "server/host/shard_backend.h"
#include "server/ops/metrics.h"

namespace emberd::coordinator {
namespace administration_test {

using ::testing::HasSubstr;
using ::testing::Pair;

constexpr char kModel[] = R"(
  name: "m"
  tables { name: "user" vocabulary_size: 64 embedding_dim: 8 max_ids_per_partition: 40
           optimizer { sgd {} learning_rate: 0.5 } }
  tables { name: "item" vocabulary_size: 64 embedding_dim: 24
           optimizer { sgd {} learning_rate: 0.5 } }
  features { name: "u" table: "user" batch_size: 4 }
  features { name: "i" table: "item" batch_size: 4 }
)";

// A coordinator behind a port, over two shards in the same process.
class AdministrationTest : public testing::Test {
 protected:
  AdministrationTest() {
    cluster_ = *config::ParseCluster(R"(
        shards { address: "127.0.0.1:1" http_address: "127.0.0.1:8081" }
        shards { address: "127.0.0.1:2" }
        coordinators { address: "127.0.0.1:0" }
        sparsecores_per_shard: 1
        budgets { batch_bytes: 1000000 in_flight_bytes: 2000000 })");
    EXPECT_TRUE(config::CompleteCluster(&cluster_).ok());
    std::vector<std::shared_ptr<host::ShardBackend>> shards;
    for (int i = 0; i < 2; ++i)
      shards.push_back(*host::MakeLocalShard(cluster_, i, &metrics_, &threads_));
    server_ = *CoordinatorServer::Start({.cluster = cluster_,
                                         .coordinator_index = 0,
                                         .shards = std::move(shards),
                                         .metrics = &metrics_,
                                         .threads = &threads_});
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
    embedding_ = v1::EmbeddingService::NewStub(channel_);
    admin_ = v1::AdminService::NewStub(channel_);
  }

  uint64_t Declare() {
    v1::DeclareModelRequest request;
    *request.mutable_config() = *config::ParseModel(kModel);
    v1::DeclareModelResponse response;
    grpc::ClientContext context;
    const grpc::Status status = embedding_->DeclareModel(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.model_id();
  }

  grpc::Status Lookup(uint64_t model, v1::LookupResponse* response) {
    v1::LookupRequest request;
    request.set_model_id(model);
    for (const char* name : {"u", "i"}) {
      v1::FeatureIds* feature = request.add_features();
      feature->set_feature(name);
      v1::Tensor* ids = feature->mutable_dense()->mutable_ids();
      const int64_t values[] = {1, 2, 2, 3};
      ids->set_dtype(v1::INT64);
      ids->add_shape(4);
      ids->set_data(values, sizeof(values));
    }
    grpc::ClientContext context;
    return embedding_->Lookup(&context, request, response);
  }

  v1::GetStatsResponse Stats(int hot_rows = 0) {
    v1::GetStatsRequest request;
    request.set_hot_rows(hot_rows);
    v1::GetStatsResponse response;
    grpc::ClientContext context;
    const grpc::Status status = admin_->GetStats(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  v1::DrainResponse Drain(bool undo) {
    v1::DrainRequest request;
    request.set_undo(undo);
    v1::DrainResponse response;
    grpc::ClientContext context;
    const grpc::Status status = admin_->Drain(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  // What grpc.health.v1 says of the server: its request is empty and its answer one number.
  static constexpr int kServing = 1;
  static constexpr int kNotServing = 2;
  int Health() {
    grpc::TemplatedGenericStub<google::protobuf::Empty, google::protobuf::Int32Value> stub(
        channel_);
    const google::protobuf::Empty request;
    google::protobuf::Int32Value response;
    grpc::ClientContext context;
    absl::Notification done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                   &response, [&](const grpc::Status& status) {
                     EXPECT_TRUE(status.ok()) << status.error_message();
                     done.Notify();
                   });
    done.WaitForNotification();
    return response.value();
  }

  v1::ClusterConfig cluster_;
  std::shared_ptr<grpc::Channel> channel_;
  ops::Metrics metrics_{"up"};
  ThreadPools threads_{2};
  std::unique_ptr<CoordinatorServer> server_;
  std::unique_ptr<v1::EmbeddingService::Stub> embedding_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

const v1::MethodStats* FindMethod(const v1::GetStatsResponse& stats, const std::string& name) {
  for (const v1::MethodStats& method : stats.methods()) {
    if (method.method() == name) return &method;
  }
  return nullptr;
}

TEST_F(AdministrationTest, BeforeAnyRequestThereAreBudgetsAndShards) {
  const v1::GetStatsResponse stats = Stats();
  EXPECT_GT(stats.time_ms(), 1'600'000'000'000);
  EXPECT_FALSE(stats.draining());
  EXPECT_EQ(stats.in_flight_requests(), 0);  // this one is not counted
  EXPECT_EQ(stats.in_flight_budget_bytes(), 2000000);
  EXPECT_EQ(stats.batch_budget_bytes(), 1000000);
  EXPECT_EQ(stats.methods_size(), 0);
  EXPECT_EQ(stats.stages_size(), static_cast<int>(ops::kStageCount));
  ASSERT_EQ(stats.shards_size(), 2);
  EXPECT_TRUE(stats.shards(1).reachable());
  EXPECT_EQ(stats.shards(1).index(), 1);
  EXPECT_EQ(stats.shards(0).http_address(), "127.0.0.1:8081");
}

TEST_F(AdministrationTest, LeavesShardsOutForOtherCoordinators) {
  Declare();
  v1::GetStatsRequest request;
  request.set_without_shards(true);
  v1::GetStatsResponse stats;
  grpc::ClientContext context;
  ASSERT_TRUE(admin_->GetStats(&context, request, &stats).ok());
  EXPECT_EQ(stats.shards_size(), 0);
  EXPECT_GT(stats.time_ms(), 0);
}

TEST_F(AdministrationTest, CountsWhatLookupsDid) {
  const uint64_t model = Declare();
  v1::LookupResponse response;
  ASSERT_TRUE(Lookup(model, &response).ok());
  ASSERT_TRUE(Lookup(model, &response).ok());
  EXPECT_FALSE(Lookup(model + 1, &response).ok());

  const v1::GetStatsResponse stats = Stats(3);
  const v1::MethodStats* lookup = FindMethod(stats, "EmbeddingService/Lookup");
  ASSERT_NE(lookup, nullptr);
  EXPECT_THAT(lookup->codes(), testing::UnorderedElementsAre(Pair("OK", 2), Pair("NOT_FOUND", 1)));
  EXPECT_EQ(lookup->seconds().count(), 3);
  EXPECT_GT(lookup->seconds().sum(), 0);
  EXPECT_GT(lookup->request_bytes(), 3 * 2 * 4 * 8);
  EXPECT_GT(lookup->response_bytes(), 2 * 4 * (8 + 24) * 4);
  const auto& buckets = lookup->seconds().buckets();
  EXPECT_EQ(buckets[buckets.size() - 1].count(), 3);
  EXPECT_TRUE(std::isinf(buckets[buckets.size() - 1].upper()));

  EXPECT_EQ(stats.stages(0).stage(), "decode");
  EXPECT_GE(stats.stages(0).seconds().count(), 2);
  EXPECT_EQ(stats.batches(), 2);
  EXPECT_GT(stats.batch_bytes(), 0);

  ASSERT_EQ(stats.stacks_size(), 2);
  int64_t ids = 0;
  bool limit_seen = false;
  for (const v1::StackStats& stack : stats.stacks()) {
    EXPECT_EQ(stack.model(), "m");
    EXPECT_EQ(stack.batches(), 2);
    EXPECT_EQ(stack.unique_ids(), 2 * 3) << stack.stack();
    EXPECT_GE(stack.largest_ids_per_partition(), 2);
    EXPECT_GE(stack.largest_unique_ids_per_partition(), 2);
    limit_seen |= stack.max_ids_per_partition() == 40;
    ids += stack.ids();
  }
  EXPECT_EQ(ids, 2 * 2 * 4);
  EXPECT_TRUE(limit_seen);
  int64_t gathered = 0;
  for (const v1::ShardStatus& shard : stats.shards()) gathered += shard.rows_gathered();
  EXPECT_EQ(gathered, 2 * 2 * 4);
}

TEST_F(AdministrationTest, DrainRefusesWhatIsNewUntilItIsUndone) {
  const uint64_t model = Declare();
  v1::LookupResponse kept;
  ASSERT_TRUE(Lookup(model, &kept).ok());
  EXPECT_EQ(Health(), kServing);

  EXPECT_TRUE(Drain(/*undo=*/false).draining());
  const v1::DrainResponse again = Drain(/*undo=*/false);
  EXPECT_TRUE(again.draining());
  EXPECT_EQ(again.batches(), 1);
  EXPECT_EQ(again.in_flight_requests(), 0);
  EXPECT_EQ(Health(), kNotServing);
  EXPECT_TRUE(Stats().draining());
  const auto shown = [&] {
    return ops::MetricSnapshot(metrics_.collectables())
        .Value(ops::MetricId::kDraining, {"coordinator-0"});
  };
  EXPECT_EQ(shown(), 1);
  v1::LookupResponse response;
  const grpc::Status refused = Lookup(model, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.error_message(), "the coordinator is draining; use another one");
  v1::ReleaseBatchRequest release;
  release.set_model_id(model);
  release.set_batch_handle(kept.batch_handle());
  v1::ReleaseBatchResponse released;
  grpc::ClientContext context;
  EXPECT_TRUE(embedding_->ReleaseBatch(&context, release, &released).ok());

  const v1::DrainResponse undone = Drain(/*undo=*/true);
  EXPECT_FALSE(undone.draining());
  EXPECT_EQ(shown(), 0);
  EXPECT_EQ(undone.batches(), 0);
  EXPECT_EQ(Health(), kServing);
  EXPECT_TRUE(Lookup(model, &response).ok());
  EXPECT_FALSE(Drain(/*undo=*/true).draining());
}

TEST_F(AdministrationTest, AStopIsNotUndone) {
  const uint64_t model = Declare();
  server_->administration()->Stop();
  v1::DrainRequest request;
  request.set_undo(true);
  v1::DrainResponse response;
  grpc::ClientContext context;
  const grpc::Status undo = admin_->Drain(&context, request, &response);
  EXPECT_EQ(undo.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(undo.error_message(), HasSubstr("the coordinator is stopping"));
  EXPECT_TRUE(Drain(/*undo=*/false).draining());  // asks what is left
  EXPECT_EQ(Health(), kNotServing);
  v1::LookupResponse found;
  EXPECT_EQ(Lookup(model, &found).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(AdministrationTest, HotRowsHaveARange) {
  for (const int bad : {-1, 101}) {
    v1::GetStatsRequest request;
    request.set_hot_rows(bad);
    v1::GetStatsResponse response;
    grpc::ClientContext context;
    const grpc::Status status = admin_->GetStats(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), absl::StrCat("hot_rows is ", bad, "; it must be 0 to 100"));
  }
}

TEST(StatisticsTest, GroupsHaveWhatTheirMetricsSay) {
  ops::Metrics metrics("coordinator");
  v1::StepTimes times;
  times.set_wait_for_ranks_us(1'500'000);
  times.set_slowest_rank(1);
  for (const char* name : {"b", "a"}) {
    ops::GroupMetrics* group = metrics.Group("m", name);
    group->ObserveLookup(times);
    group->ObserveUpdate(times);
  }
  times.set_slowest_rank(0);
  metrics.Group("m", "b")->ObserveUpdate(times);
  metrics.Group("m", "b")->AddFailure(absl::StatusCode::kAborted);
  metrics.Group("m", "b")->AddFailure(absl::StatusCode::kUnavailable);

  v1::GetStatsResponse stats;
  AddGroupStats(ops::MetricSnapshot(metrics.collectables()), &stats);
  ASSERT_EQ(stats.groups_size(), 2);
  EXPECT_EQ(stats.groups(0).group(), "a");
  EXPECT_EQ(stats.groups(0).updates(), 1);
  EXPECT_EQ(stats.groups(0).failures(), 0);
  const v1::GroupStats& b = stats.groups(1);
  EXPECT_EQ(b.model(), "m");
  EXPECT_EQ(b.updates(), 2);
  EXPECT_EQ(b.failures(), 2);
  EXPECT_DOUBLE_EQ(b.wait_seconds(), 4.5);
  EXPECT_THAT(b.last_arrivals(), testing::UnorderedElementsAre(Pair("1", 2), Pair("0", 1)));
}

}  // namespace administration_test
}  // namespace emberd::coordinator
