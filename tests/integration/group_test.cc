// Synchronous groups: whatever the number of trainers, coordinators and shards, a step of the group
// is one update from one global batch, and leaves the bits that a single trainer leaves who is fed
// the concatenated batch. Pipelined groups follow the rule of staleness to the bit.
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace group_test {

constexpr int kPartitions = 8;
constexpr int64_t kSteps = 24;
constexpr int kTightLimit = 4;

// One process, unary calls, whole batches: step k's lookup sees the updates of all steps before k,
// or, `pipelined`, of those before k - 1.
// Steps that are skipped are looked up, and given back.
std::string DigestOfOneTrainer(int64_t steps, bool pipelined, const SkippedSteps& skips = nullptr) {
  auto cluster = Cluster::Start({.shards = 1, .sparsecores_per_shard = 8, .embedded = true});
  if (!cluster.ok()) return cluster.status().ToString();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  if (client == nullptr) return "no client";
  auto model = client->DeclareModel(GroupModel("reference", /*limit=*/0));
  if (!model.ok()) return model.status().ToString();
  std::map<int64_t, client::LookupResult> found;
  const auto lookup = [&](int64_t step) {
    auto result = client->Lookup(*model, MakeShare(step, 0, 1).Features());
    if (result.ok()) found[step] = std::move(*result);
    return result.status();
  };
  const auto update = [&](int64_t step) {
    if (skips != nullptr && skips(step)) return client->ReleaseBatch(*model, found[step].batch);
    const Share share = MakeShare(step, 0, 1);
    const auto gradients = ShareGradients(step, share, found[step].activations);
    std::vector<client::FeatureGradient> request;
    for (size_t i = 0; i < gradients.size(); ++i) {
      request.push_back({share.features[i], gradients[i], found[step].activations[i].samples});
    }
    client::ApplyOptions options;
    options.step = step;
    const absl::Status status =
        client->ApplyGradients(*model, found[step].batch, request, options).status();
    found.erase(step);
    return status;
  };
  // Lookup(0); then for every k: [pipelined: Lookup(k + 1)], Update(k), [otherwise: Lookup(k + 1)].
  absl::Status status = lookup(0);
  for (int64_t step = 0; status.ok() && step < steps; ++step) {
    const bool more = step + 1 < steps;
    if (more && pipelined) status = lookup(step + 1);
    if (status.ok()) status = update(step);
    if (status.ok() && more && !pipelined) status = lookup(step + 1);
  }
  if (!status.ok()) return status.ToString();
  return Digest(*client, *model).value_or("no digest");
}

class GroupTest : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(GroupTest, TablesAreThoseOfOneTrainerFedTheConcatenatedBatch) {
  static const std::string reference = DigestOfOneTrainer(kSteps, /*pipelined=*/false);
  ASSERT_EQ(reference.size(), 64u) << reference;
  const auto [coordinators, shards] = GetParam();
  auto cluster = Cluster::Start({.shards = shards,
                                 .sparsecores_per_shard = kPartitions / shards,
                                 .coordinators = coordinators});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    auto model = client->DeclareModel(GroupModel(absl::StrCat("m", ranks), kTightLimit));
    ASSERT_TRUE(model.ok()) << model.status();
    // By step: every rank must have cut its batch alike.
    std::map<int64_t, int32_t> minibatches;
    int32_t most = 0;
    const absl::Status status =
        TrainGroup(**cluster, *model, {.group = "run", .size = ranks}, coordinators, kSteps,
                   [&](const client::TrainLookupResult& found) {
                     const int32_t count = found.statistics.num_minibatches;
                     EXPECT_EQ(minibatches.try_emplace(found.step, count).first->second, count);
                     most = std::max(most, count);
                   });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_GT(most, 1);
    EXPECT_EQ(Digest(*client, *model).value_or("none"), reference);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GroupTest,
                         ::testing::Values(std::pair(1, 1), std::pair(1, 2), std::pair(1, 4),
                                           std::pair(2, 1), std::pair(2, 2), std::pair(2, 4)),
                         [](const auto& info) {
                           return absl::StrCat(info.param.first, "Coordinators", info.param.second,
                                               "Shards");
                         });

TEST(PipelinedGroupTest, LookupsSeeExactlyTheStepsBeforeTheLast) {
  const std::string reference = DigestOfOneTrainer(30, /*pipelined=*/true);
  ASSERT_EQ(reference.size(), 64u) << reference;
  EXPECT_NE(DigestOfOneTrainer(30, /*pipelined=*/false), reference);
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    auto model = client->DeclareModel(GroupModel(absl::StrCat("m", ranks), kTightLimit));
    ASSERT_TRUE(model.ok()) << model.status();
    const absl::Status status =
        TrainGroup(**cluster, *model, {.group = "run", .size = ranks, .pipelined = true}, 2, 30);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(Digest(*client, *model).value_or("none"), reference);
  }
}

TEST(GroupResumeTest, AGroupThatJoinsAgainGoesOnWhereItWas) {
  const std::string reference = DigestOfOneTrainer(30, /*pipelined=*/false);
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  const client::TrainOptions options{.group = "run", .size = 2};
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = TrainGroup(**cluster, *model, options, 2, 10);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(Digest(*client, *model).value_or("none"), reference);
}

// A step that is skipped takes a number and nothing else: rows and slots are those of trainers who
// looked it up and then made no update.
TEST(SkippedStepTest, LeavesTheTablesAsTheyAre) {
  constexpr int64_t kSome = 24;
  const SkippedSteps skips = [](int64_t step) { return step % 5 == 0 || step % 7 == 6; };
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  std::map<std::pair<bool, bool>, std::string> undisturbed;  // by pipelined, with skips
  for (const bool pipelined : {false, true}) {
    undisturbed[{pipelined, true}] = DigestOfOneTrainer(kSome, pipelined, skips);
    undisturbed[{pipelined, false}] = DigestOfOneTrainer(kSome, pipelined);
  }
  struct Case {
    int ranks;
    client::Consistency consistency;
    bool pipelined;
  };
  for (const Case& c :
       {Case{1, client::Consistency::kSync, false}, Case{3, client::Consistency::kSync, false},
        Case{2, client::Consistency::kSync, true}, Case{1, client::Consistency::kAsync, false},
        Case{1, client::Consistency::kBounded, false}}) {
    const std::string name =
        absl::StrCat("m", c.ranks, static_cast<int>(c.consistency), c.pipelined);
    SCOPED_TRACE(name);
    auto model = client->DeclareModel(GroupModel(name, kTightLimit));
    ASSERT_TRUE(model.ok()) << model.status();
    const absl::Status status = TrainGroup(
        **cluster, *model,
        {.group = "run", .size = c.ranks, .consistency = c.consistency, .pipelined = c.pipelined},
        2, kSome, nullptr, skips);
    ASSERT_TRUE(status.ok()) << status;
    const std::string digest = Digest(*client, *model).value_or("none");
    EXPECT_EQ(digest, (undisturbed[{c.pipelined, true}]));
    EXPECT_NE(digest, (undisturbed[{c.pipelined, false}]));
  }
}

TEST(SkippedStepTest, EveryRankSaysTheSame) {
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  const std::string before = Digest(*client, *model).value_or("none");
  std::atomic<int> asked{0};
  const absl::Status status = TrainGroup(**cluster, *model, {.group = "run", .size = 2}, 1, 1,
                                         nullptr, [&](int64_t) { return asked++ == 0; });
  EXPECT_FALSE(status.ok());
  EXPECT_NE(std::string(status.message()).find("skip of step 0"), std::string::npos) << status;
  EXPECT_EQ(Digest(*client, *model).value_or("none"), before);
}

// What would make an alert of every run that ends: a trainer that leaves in good order and counts
// as one that died; and what would hide those: the other way round.
TEST(GroupFinishTest, OnlyWhoHangsUpIsAFailure) {
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  for (const char* group : {"finishes", "hangs-up"}) {
    auto stream = client->Train(*model, {.group = group, .size = 1});
    ASSERT_TRUE(stream.ok()) << stream.status();
    const int64_t next = (*stream)->next_step();
    const absl::Status run = RunSteps(**stream, 0, 1, next, next + 5, /*pipelined=*/false);
    ASSERT_TRUE(run.ok()) << run;
    if (group == std::string("finishes")) {
      EXPECT_TRUE((*stream)->Finish().ok());
    }
  }
  const Api api((*cluster)->address());
  std::map<std::string, int64_t> failures;
  // The server may hear a little later that somebody has hung up.
  EXPECT_TRUE(Eventually([&] {
    grpc::ClientContext context;
    v1::GetStatsResponse stats;
    EXPECT_TRUE(api.admin->GetStats(&context, {}, &stats).ok());
    for (const v1::GroupStats& group : stats.groups()) failures[group.group()] = group.failures();
    return failures["hangs-up"] > 0;
  }));
  EXPECT_EQ(failures["finishes"], 0);
  EXPECT_EQ(failures["hangs-up"], 1);
}

// ASYNC and BOUNDED promise no order between ranks. What they promise is that each rank's updates
// are all made, once, in its order; with one rank that is the synchronous result.
TEST(LooseGroupTest, OneRankIsDeterministicWhateverTheConsistency) {
  const std::string reference = DigestOfOneTrainer(30, /*pipelined=*/false);
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  for (const auto consistency : {client::Consistency::kAsync, client::Consistency::kBounded}) {
    auto model = client->DeclareModel(
        GroupModel(absl::StrCat("m", static_cast<int>(consistency)), kTightLimit));
    ASSERT_TRUE(model.ok()) << model.status();
    const absl::Status status = TrainGroup(
        **cluster, *model, {.group = "run", .size = 1, .consistency = consistency}, 1, 30);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(Digest(*client, *model).value_or("none"), reference);
  }
}

TEST(LooseGroupTest, NoRankRunsFurtherAheadThanTheBound) {
  auto cluster = Cluster::Start({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::unique_ptr<client::Client> client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DeclareModel(GroupModel("m", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  client::TrainOptions options{.group = "run",
                               .size = 2,
                               .consistency = client::Consistency::kBounded,
                               .staleness_bound = 2};
  options.step_timeout = absl::Seconds(10);
  auto first = client->Train(*model, options);
  ASSERT_TRUE(first.ok()) << first.status();
  options.rank = 1;
  auto second = client->Train(*model, options);
  ASSERT_TRUE(second.ok()) << second.status();
  // Rank 1 does nothing: rank 0 may do steps 0, 1 and 2, and waits at step 3.
  ASSERT_TRUE(RunSteps(**first, 0, 2, 0, 3, false).ok());
  ASSERT_TRUE((*first)->SendLookup(3, MakeShare(3, 0, 2).Features()).ok());
  // Once rank 1 has done step 0, the wait is over.
  ASSERT_TRUE(RunSteps(**second, 1, 2, 0, 1, false).ok());
  EXPECT_TRUE((*first)->ReceiveLookup().ok());
  ASSERT_TRUE((*first)->SendUpdate(3, {}).ok());
  EXPECT_TRUE((*first)->ReceiveUpdate().ok());
  // And where rank 1 stays away, the deadline names it.
  ASSERT_TRUE((*first)->SendLookup(4, MakeShare(4, 0, 2).Features()).ok());
  const absl::Status status = (*first)->ReceiveLookup().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(std::string(status.message()).find("rank 1"), std::string::npos) << status;
}

}  // namespace group_test
}  // namespace emberd::testing
