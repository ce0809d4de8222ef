// Rows that are gone, and models that come and go. A failure here means that initial rows were
// given for trained ones and nobody said so, or that a declaration that failed left something that
// no command can remove.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <google/protobuf/text_format.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace model_loss_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kVictim = 1;

class ModelLossTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = 2, .coordinators = 2}, MixedModel("mixed"));
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(1)};
    auto other = client::Client::Connect(options);
    ASSERT_TRUE(other.ok()) << other.status();
    other_ = *std::move(other);
    initial_ = TableDigest();
    ASSERT_TRUE(TrainStep(*client_, model_, 0, 32).ok());
    ASSERT_TRUE(TrainStep(*other_, model_, 1, 32).ok());
    trained_ = TableDigest();
    ASSERT_NE(trained_, initial_);
  }

  void LoseRows() {
    cluster_->KillShard(kVictim);
    ASSERT_TRUE(cluster_->RestartShard(kVictim).ok());
  }
  static std::vector<int64_t> AllIds() {
    std::vector<int64_t> ids;
    for (int64_t id = 0; id < 32; ++id) ids.push_back(id);
    return ids;
  }
  // Every kind of call on the model.
  std::vector<absl::Status> Calls(client::Client& client) {
    const std::vector<int64_t> ids = AllIds();
    const auto rows = client.ReadRows(model_, "users", ids);
    const std::vector<float> zeros(ids.size() * 16, 0.0f);
    return {rows.status(),
            client.AssignRows(model_, "users", ids, zeros).status(),
            TrainStep(client, model_, 2, 32),
            client.Train(model_, {.group = "g"}).status(),
            client.ExportTable(
                model_, "users",
                [](int64_t, absl::Span<const float>, int64_t) { return absl::OkStatus(); }),
            client.DeclareModel(MixedModel("mixed")).status()};
  }
  // `shard`: one that has lost rows, as the errors name it.
  void ExpectLost(client::Client& client,
                  const std::string& shard = absl::StrCat("shard ", kVictim)) {
    for (const absl::Status& status : Calls(client)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("model 'mixed' is lost"), HasSubstr(shard),
                        HasSubstr("emberctl model reset mixed")));
    }
  }
  // What coordinator `coordinator` says of the model.
  std::string InStatus(int coordinator) {
    const Api api(cluster_->address(coordinator));
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    EXPECT_TRUE(api.admin->GetStatus(&context, {}, &response).ok());
    return response.models_size() == 1 ? response.models(0).lost() : "no model";
  }
  // The same, once `lost` is as expected, or in the end.
  std::string LostInStatus(int coordinator, bool lost) {
    std::string said;
    Eventually([&] {
      said = InStatus(coordinator);
      return said.empty() != lost;
    });
    return said;
  }
  double LostMetric(int coordinator) {
    return MetricSum(FetchMetrics(cluster_->http_address(coordinator)), "emberd_model_lost");
  }

  std::unique_ptr<client::Client> other_;
  std::string initial_, trained_;
};

TEST_F(ModelLossTest, EveryCallSaysSoUntilTheReset) {
  LoseRows();
  ExpectLost(*client_);
  ExpectLost(*other_);
  EXPECT_TRUE(client_->DescribeModel("mixed").ok()) << "the tables are still known";
  EXPECT_THAT(LostInStatus(0, true), HasSubstr("emberctl model reset"));
  EXPECT_EQ(LostMetric(0), 1);

  const absl::Status reset = client_->ResetModel("mixed");
  ASSERT_TRUE(reset.ok()) << reset;
  EXPECT_EQ(TableDigest(), initial_) << "no shard kept trained rows";
  for (client::Client* client : {client_.get(), other_.get()}) {
    for (const absl::Status& status : Calls(*client)) EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(LostInStatus(0, false), "");
  EXPECT_EQ(LostInStatus(1, false), "");
  EXPECT_EQ(LostMetric(0), 0);
}

// Nobody calls: coordinators look by themselves.
TEST_F(ModelLossTest, EveryCoordinatorNotices) {
  LoseRows();
  for (const int coordinator : {0, 1}) {
    EXPECT_THAT(LostInStatus(coordinator, true), HasSubstr("shard 1 no longer has its rows"));
    EXPECT_EQ(LostMetric(coordinator), 1);
  }
}

// It knows the models when it serves, although nobody has named one.
TEST_F(ModelLossTest, ACoordinatorThatStartsAfterwardsNoticesToo) {
  cluster_->KillCoordinator(1);
  ASSERT_TRUE(cluster_->RestartCoordinator(1).ok());
  EXPECT_EQ(LostInStatus(1, false), "");
  LoseRows();
  cluster_->KillCoordinator(1);
  ASSERT_TRUE(cluster_->RestartCoordinator(1).ok());
  EXPECT_THAT(LostInStatus(1, true), HasSubstr("shard 1 no longer has its rows"));
  EXPECT_EQ(LostMetric(1), 1);
  ExpectLost(*other_);
}

// The rows are gone from everywhere, and only the coordinators know that there were any.
TEST_F(ModelLossTest, AllShardsAtOnce) {
  for (const int shard : {0, 1}) cluster_->KillShard(shard);
  for (const int shard : {0, 1}) ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  ExpectLost(*client_, "shard ");  // the one that was asked first
  ASSERT_TRUE(client_->ResetModel("mixed").ok());
  EXPECT_EQ(TableDigest(), initial_);
}

TEST_F(ModelLossTest, AnUpdateOfABatchFromBeforeIsRefused) {
  const std::vector<OwnedIds> batch = MixedBatch(3, 32);
  const auto lookup = [&] { return client_->Lookup(model_, Features(batch)); };
  const auto apply = [&](const client::LookupResult& found) {
    const std::vector<std::vector<float>> gradients = MixedGradients(1, found);
    return client_->ApplyGradients(model_, found.batch, Gradients(found, gradients)).status();
  };
  auto lost = lookup(), reset = lookup();
  ASSERT_TRUE(lost.ok() && reset.ok());
  LoseRows();
  EXPECT_EQ(apply(*lost).code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(other_->ResetModel("mixed").ok());
  const absl::Status status = apply(*reset);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(TableDigest(), initial_);
}

// An export names the history that it reads, and never goes on with other rows.
TEST_F(ModelLossTest, AnExportEndsWhereTheRowsChange) {
  // Much larger than what may be on its way to a reader.
  auto model = client_->DeclareModel(
      std::string("name: 'large' tables { name: 't' vocabulary_size: 1000000 embedding_dim: 64 } "
                  "features { name: 'f' table: 't' } optimizer { sgd {} }"));
  ASSERT_TRUE(model.ok()) << model.status();
  for (const bool lose : {false, true}) {
    int64_t runs = 0;
    const absl::Status status =
        client_->ExportTable(*model, "t", [&](int64_t, absl::Span<const float>, int64_t) {
          if (++runs != 2) return absl::OkStatus();
          if (lose) {
            LoseRows();
            return absl::OkStatus();
          }
          return other_->ResetModel("large");
        });
    // UNAVAILABLE: the next rows were read while the reset was under way.
    EXPECT_TRUE(lose ? absl::IsDataLoss(status)
                     : absl::IsAborted(status) || absl::IsUnavailable(status))
        << status;
    EXPECT_LT(runs, 240);
  }
}

TEST_F(ModelLossTest, ADroppedModelIsGoneForAll) {
  const auto dropped = client_->DropModel("mixed");
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_TRUE(*dropped);
  EXPECT_FALSE(*client_->DropModel("mixed")) << "twice";
  for (client::Client* client : {client_.get(), other_.get()}) {
    EXPECT_EQ(client->ReadRows(model_, "users", AllIds()).status().code(),
              absl::StatusCode::kNotFound);
  }
  const auto status = client_->GetStatus();
  ASSERT_TRUE(status.ok());
  for (const client::ShardStatus& shard : status->shards) {
    EXPECT_EQ(shard.models, 0);
    EXPECT_EQ(shard.table_bytes, 0);
  }
  // The name is free for another model.
  client::ModelDescription another = MixedModel("mixed");
  another.tables.front().vocabulary_size += 1;
  const auto declared = other_->DeclareModel(another);
  ASSERT_TRUE(declared.ok()) << declared.status();
  EXPECT_NE(declared->id, model_.id);
  EXPECT_TRUE(TrainStep(*client_, *declared, 0, 32).ok());
}

TEST_F(ModelLossTest, NothingIsDroppedOrResetWhileAShardIsAway) {
  cluster_->KillShard(kVictim);
  for (const absl::Status& status :
       {client_->DropModel("mixed").status(), client_->ResetModel("mixed")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1"));
  }
  EXPECT_EQ(client_->ResetModel("unheard_of").code(), absl::StatusCode::kUnavailable);
}

// ---- Declarations that fail

class DeclareTest : public ClusterFixture {
 protected:
  void SetUp() override { StartCluster({.shards = 2, .coordinators = 2}, MixedModel("mixed")); }

  // With a deadline that need not do.
  grpc::Status Declare(const std::string& config, absl::Duration deadline) {
    v1::DeclareModelRequest request;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(config, request.mutable_config()));
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    v1::DeclareModelResponse response;
    return Api(cluster_->address()).embedding->DeclareModel(&context, request, &response);
  }
  static std::string Config(int64_t rows) {
    return absl::StrCat("name: 'late' tables { name: 't' vocabulary_size: ", rows,
                        " embedding_dim: 64 } features { name: 'f' table: 't' } "
                        "optimizer { sgd {} }");
  }
  // Whether shards hold the first model alone.
  bool NothingIsHere() {
    const auto status = client_->GetStatus();
    return status.ok() && std::all_of(status->shards.begin(), status->shards.end(),
                                      [](const auto& shard) { return shard.models == 1; });
  }
  bool NothingIsLeft() {
    return Eventually([&] { return NothingIsHere(); });
  }
  // Whether it has no request in progress before long.
  bool CoordinatorIsAtRest() {
    return Eventually([&] {
      const std::string page = FetchMetrics(cluster_->http_address());
      return !page.empty() && MetricSum(page, "emberd_in_flight_requests") == 0;
    });
  }
};

TEST_F(DeclareTest, ADeadlineThatPassesLeavesNothing) {
  int failed = 0;
  for (int i = 0; i < 30; ++i) {
    const grpc::Status status = Declare(Config(100'000 + i), absl::Milliseconds(1 + i % 4));
    failed += !status.ok();
    EXPECT_NE(status.error_code(), grpc::ALREADY_EXISTS) << status.error_message();
    if (status.ok()) {
      EXPECT_TRUE(client_->DropModel("late").ok());
    }
  }
  EXPECT_GT(failed, 0);
  // A declaration may have ended just after its caller: then it is there, whole.
  EXPECT_TRUE(CoordinatorIsAtRest());
  absl::SleepFor(absl::Seconds(1));
  EXPECT_TRUE(Eventually([&] { return client_->DropModel("late").ok() && NothingIsHere(); }));
  const grpc::Status corrected = Declare(Config(99), absl::Seconds(30));
  EXPECT_TRUE(corrected.ok()) << corrected.error_message();
}

TEST_F(DeclareTest, AStoppedShardLeavesNothing) {
  cluster_->SuspendShard(1);
  EXPECT_FALSE(Declare(Config(1000), absl::Seconds(1)).ok());
  EXPECT_TRUE(CoordinatorIsAtRest()) << "it gives up, too";
  cluster_->ResumeShard(1);
  EXPECT_TRUE(NothingIsLeft());
  const grpc::Status corrected = Declare(Config(99), absl::Seconds(30));
  EXPECT_TRUE(corrected.ok()) << corrected.error_message();
}

// They find each other's work half done; all of them end with the model.
TEST_F(DeclareTest, ManyAtOnceThroughTwoCoordinators) {
  client::ClientOptions options = cluster_->client_options();
  std::vector<std::thread> trainers;
  std::atomic<int> declared = 0;
  for (int t = 0; t < 8; ++t) {
    trainers.emplace_back([&, t] {
      client::ClientOptions own = options;
      own.addresses = {cluster_->address(t % 2)};
      auto client = client::Client::Connect(own);
      const auto model = (*client)->DeclareModel(Config(50'000));
      EXPECT_TRUE(model.ok()) << model.status();
      if (model.ok()) ++declared;
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_EQ(declared, 8);
}

}  // namespace model_loss_test
}  // namespace emberd::testing
