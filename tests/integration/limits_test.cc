// Covers: server/coordinator/administration.cc, server/step/step.cc
// Covers: server/coordinator/model_registry.cc
// Limits from a live cluster: what emberctl suggests must be what the batches needed, over all
// coordinators, and a batch must fit the written config without mini-batches.
#include <atomic>
#include <filesystem>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
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
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

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
  EXPECT_THAT(shown.out, HasSubstr("wrote " + path + "\n"));
  //                                            batches p50  p90  p99   max  now suggested
  EXPECT_THAT(shown.out, ContainsRegex("t +ids per partition +10 +10 +10 +100 +100 +16 +152"));
  EXPECT_THAT(shown.out, ContainsRegex("t +unique ids per partition +10 +10 +10 +30 +30 +16 +48"));
  EXPECT_THAT(limits({"--json"}).out, HasSubstr("\"suggested\": 120"));
  EXPECT_THAT(limits({"--headroom", "1.5", "--out", "/dev/stdout"}).out,
              HasSubstr("max_ids_per_partition: 152"));

  // A file that cannot be written anew stays as it was.
  ASSERT_TRUE(std::filesystem::create_directory(path + ".partial"));
  EXPECT_THAT(limits({"--out", path}).err, HasSubstr(path + ": cannot be written"));
  EXPECT_TRUE(std::filesystem::remove(path + ".partial"));  // it was there before
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

// A capacity holds wherever ids come in: room for eight ids of a sample, and for two mini-batches.
class CapacityTest : public ClusterFixture {
 protected:
  static constexpr char kTight[] = R"(name: "$0"
      tables { name: "t" vocabulary_size: 4096 embedding_dim: 8 } features { name: "x" table: "t" }
      optimizer { sgd {} } plan { max_ids_per_chip_per_sample: 8
                                  max_minibatches_per_sparsecore: 2 allow_id_dropping: $1 })";

  void SetUp() override {
    StartCluster({.coordinators = 2}, absl::Substitute(kTight, "tight", "false"));
  }
  // Of one sample, all in one partition.
  static std::vector<client::FeatureIds> Sample(const std::vector<int64_t>& ids) {
    return {{"x", client::DenseIds{ids, static_cast<int64_t>(ids.size())}}};
  }
  absl::Status LookUp(const std::vector<int64_t>& ids) {
    return client_->Lookup(model_, Sample(ids)).status();
  }
  std::unique_ptr<client::TrainStream> Join(const client::Model& model, int rank, int size) {
    client::TrainOptions options{.group = "run", .rank = rank, .size = size};
    auto stream = client_->Train(model, options);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }
  Outcome Limits(std::vector<std::string> more) {
    more.insert(more.begin(), {"limits", "tight", "-a", cluster_->address(0), "-a",
                               cluster_->address(1), "--headroom", "1"});
    return Emberctl(more);
  }

  const std::vector<int64_t> eight_ = Ids(8, 8), nine_ = Ids(9, 9);
};

// Would catch: a capacity that holds for programs alone; a rank that waits for one that was
// refused; a refused step that was made.
TEST_F(CapacityTest, RefusesLookupsAndStepsOfAllRanks) {
  const std::string before = TableDigest();
  EXPECT_TRUE(LookUp(eight_).ok());
  const absl::Status lookup = LookUp(nine_);
  EXPECT_EQ(lookup.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(lookup.message()),
              HasSubstr("stack 't' needs 16 cells of its buffer of ids, whose capacity is 8 "
                        "(max_ids_per_chip_per_sample 8 x 1 samples); ids that do not fit: 1"));
  auto first = std::async([&] { return Join(model_, 0, 2); });
  const auto second = Join(model_, 1, 2);
  const auto other = first.get();
  ASSERT_TRUE(second != nullptr && other != nullptr);
  ASSERT_TRUE(second->SendLookup(0, Sample(nine_)).ok());
  ASSERT_TRUE(other->SendLookup(0, Sample(eight_)).ok());
  const absl::Status refused = second->ReceiveLookup().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  // The other rank may have looked up by then; its update cannot be made.
  absl::Status told = other->ReceiveLookup().status();
  if (told.ok()) {
    other->SendUpdate(0, {}).IgnoreError();
    told = other->ReceiveUpdate().status();
  }
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("rank 1"));
  EXPECT_THAT(std::string(told.message()), HasSubstr("max_ids_per_chip_per_sample 8 x 1 samples"));
  EXPECT_EQ(TableDigest(), before);
}

// Would catch: needs that nobody sees because the batch was refused; a capacity that stays.
TEST_F(CapacityTest, IsSuggestedAndApplied) {
  EXPECT_FALSE(LookUp(nine_).ok());
  const Outcome shown = Limits({});
  EXPECT_THAT(shown.out, ContainsRegex("ids per chip and sample +1 +16 +16 +16 +16 +8 +16"));
  EXPECT_THAT(shown.out, ContainsRegex("mini-batches +1 +1 +1 +1 +1 +2 +8"));
  const Outcome applied = Limits({"--apply"});
  ASSERT_EQ(applied.code, emberctl::kOk) << applied.err;
  EXPECT_THAT(applied.out, ContainsRegex("t +16 +16 +16 +8"));
  EXPECT_TRUE(LookUp(nine_).ok());
  EXPECT_FALSE(LookUp(Ids(24, 24)).ok());
  // Four mini-batches or more for ids of one partition; what is not named stays as it is.
  v1::SetLimitsRequest few;
  few.set_model("tight");
  few.add_limits()->set_stack("t");
  few.mutable_limits(0)->set_max_ids_per_partition(4);
  few.mutable_limits(0)->set_max_minibatches_per_sparsecore(2);
  v1::SetLimitsResponse now;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SetLimits, Api(cluster_->address(0)), few, &now).ok());
  EXPECT_EQ(now.limits(0).max_ids_per_chip_per_sample(), 16);
  EXPECT_THAT(std::string(LookUp(Ids(16, 16)).message()),
              AllOf(HasSubstr("stack 't': the batch makes"),
                    HasSubstr("mini-batches; max_minibatches_per_sparsecore is 2")));
  const Outcome declared = Limits({"--declared", "--json"});
  ASSERT_EQ(declared.code, emberctl::kOk) << declared.err;
  EXPECT_THAT(declared.out, ContainsRegex("\"ids_per_chip_per_sample\": \\{[^}]*\"limit\": 8,"));
  EXPECT_FALSE(LookUp(nine_).ok());
}

TEST_F(CapacityTest, WhatIsDroppedIsCountedForEachRank) {
  const auto model = client_->DeclareModel(absl::Substitute(kTight, "dropping", "true"));
  ASSERT_TRUE(model.ok()) << model.status();
  auto first = std::async([&] { return Join(*model, 0, 2); });
  const auto second = Join(*model, 1, 2);
  const auto other = first.get();
  ASSERT_TRUE(second != nullptr && other != nullptr);
  ASSERT_TRUE(second->SendLookup(0, Sample(nine_)).ok());
  ASSERT_TRUE(other->SendLookup(0, Sample(eight_)).ok());
  const auto dropped = second->ReceiveLookup();
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->statistics.stacks[0].dropped_ids, 1);
  ASSERT_TRUE(other->ReceiveLookup().ok());
  v1::GetStatsResponse stats;
  const Api api(cluster_->address(0));
  Eventually([&] {
    EXPECT_TRUE(Call(&v1::AdminService::Stub::GetStats, api, v1::GetStatsRequest(), &stats).ok());
    return stats.groups_size() == 1 && stats.groups(0).dropped_ids().size() == 2;
  });
  EXPECT_THAT(stats.groups(0).dropped_ids(), UnorderedElementsAre(Pair("0", 0), Pair("1", 1)));
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

  std::atomic<int> cut = 0, whole_after_cut = 0, lookups = 0, most = 0;
  std::atomic<bool> over = false;
  absl::Status trained;
  std::thread trainers([&] {
    trained = TrainGroup(*cluster_, model_, options, 2, kSteps, [&](const auto& found) {
      // Not much further than is looked for below, however late that comes.
      while (lookups >= most) absl::SleepFor(absl::Milliseconds(1));
      ++lookups;
      if (found.statistics.num_minibatches > 1) {
        ++cut;
      } else if (cut > 0) {
        ++whole_after_cut;
      }
    });
    over = true;
  });
  // Tight ones, those that were declared, tight ones again through the other coordinator, and what
  // batches need.
  const auto after = [&](int more) {
    for (int c = 0; c < 2; ++c) Limits(c);  // which asks the shards
    const int begin = lookups;
    most = begin + more + 30;
    while (lookups < begin + more && lookups < 2 * kSteps && !over)
      absl::SleepFor(absl::Milliseconds(1));
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
  most = 2 * kSteps;
  const Outcome applied = Emberctl(
      {"limits", "live", "--apply", "-a", cluster_->address(0), "-a", cluster_->address(1)});
  trainers.join();
  EXPECT_TRUE(trained.ok()) << trained;
  EXPECT_EQ(lookups, 2 * kSteps);
  EXPECT_GT(cut, 0);
  EXPECT_GT(whole_after_cut, 0);
  EXPECT_EQ(applied.code, emberctl::kOk) << applied.err;
  EXPECT_THAT(applied.out, HasSubstr("limits of model 'live' now:"));
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
  EXPECT_THAT(refused(request),
              HasSubstr("limits[0].max_ids_per_partition: -1 is not allowed; it must be >= 0"));
  request = Unique(4);
  request.mutable_limits(0)->set_max_minibatches_per_sparsecore(65);
  EXPECT_THAT(refused(request), HasSubstr("limits[0].max_minibatches_per_sparsecore: 65 is not "));
  request.set_model("none");
  EXPECT_THAT(refused(request), HasSubstr("model 'none' is not declared"));
  AwaitUnique(0, 0);
  // No batch yet, so there is nothing to suggest.
  const Outcome outcome = Emberctl({"limits", "live", "--apply", "-a", cluster_->address(0)});
  EXPECT_NE(outcome.code, emberctl::kOk);
  EXPECT_THAT(outcome.err, HasSubstr("model 'live' has had no batch since"));
  const Outcome written =
      Emberctl({"limits", "live", "--out", "/dev/stdout", "-a", cluster_->address(0)});
  EXPECT_EQ(written.code, emberctl::kOk) << written.err;
  EXPECT_THAT(written.out, HasSubstr("wrote /dev/stdout, with the limits that it has: no batch "));
}

}  // namespace limits_test
}  // namespace emberd::testing
