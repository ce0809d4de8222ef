// Covers: server/coordinator/administration.cc, server/step/step.cc
// Covers: server/coordinator/model_registry.cc
// Limits from a live cluster: what emberctl suggests must be what the batches needed, over all
// coordinators, and a batch must fit the written config without mini-batches.
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace limits_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr char kModel[] = R"(name: "limited"
tables { name: "t" vocabulary_size: 4096 embedding_dim: 8
         max_ids_per_partition: 16 max_unique_ids_per_partition: 16 }
features { name: "x" table: "t" }
optimizer { sgd {} })";

struct Outcome {
  int code = -1;
  std::string out, err;
};

Outcome Emberctl(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"emberctl"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str(), err.str()};
}

// `count` samples of one id each, all from partition 0 of 4 and all in one source slot's half:
// ids 0, 4, 8, ... repeated from `distinct` on.
std::vector<int64_t> Ids(int count, int distinct) {
  std::vector<int64_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(4 * (i % distinct));
  return ids;
}

TEST(LimitsTest, SuggestsWhatBatchesNeeded) {
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start({.coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const std::vector<std::string> addresses = {"-a", (*cluster)->address(0), "-a",
                                              (*cluster)->address(1)};
  const auto limits = [&addresses](std::vector<std::string> more) {
    more.insert(more.begin(), {"limits", "limited"});
    more.insert(more.end(), addresses.begin(), addresses.end());
    return Emberctl(more);
  };
  EXPECT_THAT(limits({}).err, HasSubstr("NOT_FOUND"));

  // Two slots: a batch of n samples sends n / 2 ids from each. Nine small batches to the first
  // coordinator, a large one to the second.
  for (int c = 0; c < 2; ++c) {
    client::ClientOptions options;
    options.addresses = {(*cluster)->address(c)};
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    absl::StatusOr<client::Model> model = (*client)->DeclareModel(kModel);
    ASSERT_TRUE(model.ok()) << model.status();
    for (int n = 0; n < (c == 0 ? 9 : 1); ++n) {
      const std::vector<int64_t> ids = c == 0 ? Ids(20, 1000) : Ids(200, 30);
      const auto found =
          (*client)->Lookup(*model, {{"x", client::DenseIds{ids}}}, {.inference = true});
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->statistics.num_minibatches > 1, c == 1);
    }
  }
  const std::string path = TempPath("limits_test.textproto");
  const Outcome shown = limits({"--headroom", "1.5", "--out", path});
  ASSERT_EQ(shown.code, emberctl::kOk) << shown.err;
  //                                            batches p50  p90  p99   max  now suggested
  EXPECT_THAT(shown.out, ContainsRegex("t +ids +10 +10 +10 +100 +100 +16 +152"));
  EXPECT_THAT(shown.out, ContainsRegex("t +unique ids +10 +10 +10 +30 +30 +16 +48"));
  EXPECT_THAT(limits({"--json"}).out, HasSubstr("\"suggested\": 120"));

  absl::StatusOr<v1::ModelConfig> written = config::LoadModel(path);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->tables(0).max_ids_per_partition(), 152);
  EXPECT_EQ(written->tables(0).max_unique_ids_per_partition(), 48);
  written->set_name("roomier");
  auto client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  absl::StatusOr<client::Model> model = client->DeclareModel(written->DebugString());
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<int64_t> ids = Ids(200, 30);
  const auto found = client->Lookup(*model, {{"x", client::DenseIds{ids}}}, {.inference = true});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->statistics.num_minibatches, 1);
}

class LiveLimitsTest : public ClusterFixture {
 protected:
  static constexpr int64_t kSteps = 120;

  void SetUp() override {
    StartCluster({.coordinators = 2}, GroupModel("live", /*limit=*/0));
    for (int c = 0; !HasFatalFailure() && c < 2; ++c) {
      apis_.push_back(std::make_unique<Api>(cluster_->address(c)));
    }
  }
  grpc::Status Set(const v1::SetLimitsRequest& request, int coordinator = 0) {
    v1::SetLimitsResponse response;
    return Call(&v1::AdminService::Stub::SetLimits, *apis_[coordinator], request, &response);
  }
  // Of the unique ids of all stacks.
  v1::SetLimitsRequest Unique(int limit) {
    v1::SetLimitsRequest request;
    request.set_model("live");
    const v1::GetLimitsResponse now = Limits(0);
    for (const v1::StackLimits& stack : now.stacks()) {
      request.add_limits()->set_stack(stack.stack());
      request.mutable_limits()->rbegin()->set_max_unique_ids_per_partition(limit);
    }
    return request;
  }
  v1::GetLimitsResponse Limits(int coordinator) {
    v1::GetLimitsRequest request;
    request.set_model("live");
    v1::GetLimitsResponse response;
    const grpc::Status status =
        Call(&v1::AdminService::Stub::GetLimits, *apis_[coordinator], request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  // Every coordinator knows of a change within seconds.
  void AwaitUnique(int coordinator, int limit) {
    Eventually(
        [&] { return Limits(coordinator).stacks(0).max_unique_ids_per_partition() == limit; });
    const v1::GetLimitsResponse now = Limits(coordinator);
    for (const v1::StackLimits& stack : now.stacks()) {
      EXPECT_EQ(stack.max_unique_ids_per_partition(), limit) << stack.stack();
    }
  }

  std::vector<std::unique_ptr<Api>> apis_;
};

TEST_F(LiveLimitsTest, AModelInTrainingTakesNewLimits) {
  auto still = client_->DeclareModel(GroupModel("still", /*limit=*/0));
  ASSERT_TRUE(still.ok()) << still.status();
  client::TrainOptions options;
  options.group = "run";
  options.size = 2;
  ASSERT_TRUE(TrainGroup(*cluster_, *still, options, 2, kSteps).ok());

  std::atomic<int> cut = 0, whole_after_cut = 0, lookups = 0;
  absl::Status trained;
  std::thread trainers([&] {
    trained = TrainGroup(*cluster_, model_, options, 2, kSteps, [&](const auto& found) {
      ++lookups;
      if (found.statistics.num_minibatches > 1) {
        ++cut;
      } else if (cut > 0) {
        ++whole_after_cut;
      }
    });
  });
  // Tight ones, those that were declared, tight ones again through the other coordinator, and what
  // batches need.
  const auto after = [&](int more) {
    for (int c = 0; c < 2; ++c) Limits(c);  // which asks the shards
    const int begin = lookups;
    while (lookups < begin + more && lookups < 2 * kSteps) absl::SleepFor(absl::Milliseconds(1));
  };
  after(10);
  const v1::SetLimitsRequest tight = Unique(4);
  v1::SetLimitsRequest declared;
  declared.set_model("live");
  declared.set_declared(true);
  EXPECT_TRUE(Set(tight).ok());
  after(20);
  EXPECT_TRUE(Set(declared, 1).ok());
  after(20);
  EXPECT_TRUE(Set(tight, 1).ok());
  after(20);
  const Outcome applied = Emberctl(
      {"limits", "live", "--apply", "-a", cluster_->address(0), "-a", cluster_->address(1)});
  trainers.join();
  EXPECT_TRUE(trained.ok()) << trained;
  EXPECT_EQ(lookups, 2 * kSteps);
  EXPECT_GT(cut, 0);
  EXPECT_GT(whole_after_cut, 0);
  EXPECT_EQ(applied.code, emberctl::kOk) << applied.err;
  EXPECT_THAT(applied.out, HasSubstr("limits of model 'live' now, per partition"));
  EXPECT_EQ(TableDigest(), Digest(*client_, *still).value_or("none"));
}

TEST_F(LiveLimitsTest, LimitsStayWithTheModelAndRowsAsTheyAre) {
  const std::string before = TableDigest();
  ASSERT_TRUE(Set(Unique(5)).ok());
  EXPECT_EQ(TableDigest(), before);
  AwaitUnique(0, 5);
  AwaitUnique(1, 5);
  v1::DescribeModelRequest describe;
  describe.set_name("live");
  v1::DescribeModelResponse described;
  ASSERT_TRUE(
      Call(&v1::EmbeddingService::Stub::DescribeModel, *apis_[1], describe, &described).ok());
  EXPECT_EQ(described.plan().stacks(0).max_unique_ids_per_partition(), 5);
  EXPECT_EQ(described.config().tables(0).max_unique_ids_per_partition(), 0);

  // A coordinator that comes back asks the shards; a reset gives the model new rows, no new limits.
  cluster_->KillCoordinator(1);
  ASSERT_TRUE(cluster_->RestartCoordinator(1).ok());
  apis_[1] = std::make_unique<Api>(cluster_->address(1));
  AwaitUnique(1, 5);
  ASSERT_TRUE(client_->ResetModel("live").ok());
  AwaitUnique(0, 5);
  AwaitUnique(1, 5);
  ASSERT_TRUE(Set(Unique(6), 1).ok());
  AwaitUnique(0, 6);
  // Dropped and declared again, it has those of its description.
  ASSERT_TRUE(client_->DropModel("live").ok());
  ASSERT_TRUE(client_->DeclareModel(GroupModel("live", /*limit=*/0)).ok());
  AwaitUnique(0, 0);
  AwaitUnique(1, 0);
}

TEST_F(LiveLimitsTest, WrongLimitsAreRefusedAndChangeNothing) {
  const auto refused = [&](v1::SetLimitsRequest request) {
    const grpc::Status status = Set(request);
    EXPECT_FALSE(status.ok());
    return absl::StrCat(status.error_code(), " ", status.error_message());
  };
  v1::SetLimitsRequest request = Unique(4);
  const std::string first = request.limits(0).stack();
  request.add_limits()->set_stack("nothing");
  EXPECT_THAT(refused(request),
              HasSubstr(absl::StrCat("limits[", request.limits_size() - 1,
                                     "].stack is 'nothing', which model 'live' does not have")));
  request = Unique(4);
  *request.add_limits() = request.limits(0);
  EXPECT_THAT(refused(request), HasSubstr(absl::StrCat("'", first, "' is repeated")));
  request = Unique(4);
  request.mutable_limits(0)->set_max_ids_per_partition(-1);
  EXPECT_THAT(refused(request), HasSubstr("are -1 and 4; they must be >= 0 (0: no limit)"));
  request.set_model("none");
  EXPECT_THAT(refused(request), HasSubstr("model 'none' is not declared"));
  AwaitUnique(0, 0);
  // No batch yet, so there is nothing to suggest.
  const Outcome outcome = Emberctl({"limits", "live", "--apply", "-a", cluster_->address(0)});
  EXPECT_NE(outcome.code, emberctl::kOk);
  EXPECT_THAT(outcome.err, HasSubstr("model 'live' has had no batch since"));
}

}  // namespace limits_test
}  // namespace emberd::testing
