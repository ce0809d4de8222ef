// More models than the shards' memory holds (ClusterConfig.eviction). Trained in turns, they have
// the tables of a cluster that keeps them all, also when shards die in between and come back from
// checkpoints and logs; and where the disk has no room for evicted rows, a call is refused and
// nothing is lost. Catches: rows that come back wrong, an update that is lost with a spill file, a
// checkpoint or a recovery that does not find rows which are elsewhere.
//
// Covers: client/emberctl/verbs/memory.cc
#include "tests/fault/eviction_cluster.h"

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "client/emberctl/emberctl.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace eviction_cluster_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

using EvictionClusterTest = EvictionCluster;

TEST_F(EvictionClusterTest, ThreeModelsWithMemoryForTwoHaveTheTablesOfThreeThatStay) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(kModels).ok());
  for (int step = 0; step < 5; ++step) {
    for (int model = 0; model < kModels; ++model) {
      ASSERT_TRUE(calm_->Step(model, step).ok());
      const absl::Status status = two.Step(model, step);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  for (int model = 0; model < kModels; ++model) {
    EXPECT_EQ(two.Tables(model), calm_->Tables(model)) << model;
  }
  const v1::MemoryStatus memory = ShardStatusOf(*two.cluster, 0).memory();
  EXPECT_EQ(memory.bytes(), BytesFor(2));
  EXPECT_GE(memory.returns(), 5);
  EXPECT_GT(memory.spilled_bytes(), 0);
  EXPECT_EQ(memory.free_bytes(), kept_for_batches_);
  for (const v1::MemoryTable& table : memory.tables()) {
    EXPECT_EQ(table.place(), table.model() == EvictedName(0) ? v1::MemoryTable::SPILLED
                                                             : v1::MemoryTable::SPARSECORE);
  }
  const Shown shown = Emberctl(*two.cluster, {"memory"});
  EXPECT_EQ(shown.code, emberctl::kOk) << shown.text;
  EXPECT_THAT(shown.text, ContainsRegex("shard 1: on each SparseCore 48.0 KiB of [^\n]+ free"));
  EXPECT_THAT(shown.text, ContainsRegex("evicted, on disk +mixed-0 "));
  EXPECT_THAT(shown.text, ContainsRegex("\n0 +mixed-[12] "));
  const Shown without = Emberctl(*calm_->cluster, {"memory"});
  EXPECT_NE(without.code, emberctl::kOk);
  EXPECT_THAT(without.text, HasSubstr("its description has no `eviction`"));
  EXPECT_TRUE(Eventually([&] {  // the page is brought up to date once a second
    return MetricSum(FetchMetrics(two.cluster->shard_http_address(0)), "emberd_evictions_total") >=
           5;
  }));
}

// A batch between lookup and update is on the SparseCores.
TEST_F(EvictionClusterTest, AModelThatIsNotUsedLeavesForAKeptBatch) {
  kept_for_batches_ = 8;  // too little for one
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(2).ok());
  const std::vector<OwnedIds> batch = MixedBatch(/*seed=*/0, /*samples=*/32);
  const auto found = two.client->Lookup(two.models[0], Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  int kept = 0;
  for (int shard = 0; shard < kShards; ++shard) {
    const v1::MemoryStatus memory = ShardStatusOf(*two.cluster, shard).memory();
    EXPECT_GT(memory.batch_bytes(), 8);
    for (const v1::MemoryTable& table : memory.tables()) {
      if (table.model() == EvictedName(1)) {
        EXPECT_EQ(table.place(), v1::MemoryTable::SPILLED);
      }
      if (!table.stack().empty()) continue;
      EXPECT_EQ(table.model(), EvictedName(0));
      EXPECT_EQ(table.bytes(), memory.batch_bytes());
      EXPECT_GE(table.address(), 0);
      ++kept;
    }
  }
  EXPECT_EQ(kept, kShards);
  EXPECT_THAT(Emberctl(*two.cluster, {"memory"}).text, ContainsRegex("mixed-0 +\\(a batch\\) "));
  const auto gradients = MixedGradients(/*seed=*/0, *found);
  const auto applied =
      two.client->ApplyGradients(two.models[0], found->batch, Gradients(*found, gradients));
  ASSERT_TRUE(applied.ok()) << applied.status();
  for (int shard = 0; shard < kShards; ++shard) {
    EXPECT_EQ(ShardStatusOf(*two.cluster, shard).memory().batch_bytes(), 0);
  }
  ASSERT_TRUE(calm_->Step(0, 0).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {1}));
  ExpectRightTables(two, {0, 1});
}

TEST_F(EvictionClusterTest, ABatchForWhichThereIsNoRoomIsRefusedAndLookupsGoOn) {
  kept_for_batches_ = 8;
  Trained one = StartFor(1);
  ASSERT_TRUE(one.Declare(1).ok());
  const std::vector<OwnedIds> batch = MixedBatch(/*seed=*/0, /*samples=*/32);
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = one.client->Lookup(one.models[0], Features(batch)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("a batch of model mixed-0: needs "));
    const auto found = one.client->Lookup(one.models[0], Features(batch), {.inference = true});
    EXPECT_TRUE(found.ok()) << found.status();
  }
  for (int i = 0; i < kShards; ++i) {
    const v1::ShardStatus shard = ShardStatusOf(*one.cluster, i);
    EXPECT_EQ(shard.memory().batch_bytes(), 0);
    EXPECT_EQ(shard.batches(), 0);
    EXPECT_EQ(shard.memory().evictions(), 0);
  }
  ExpectRightTables(one, {0});
}

TEST_F(EvictionClusterTest, ShardsThatDieComeBackWithTheRowsOfEvictedModels) {
  Trained two = StartFor(2, absl::StrCat("host_bytes_per_sparsecore: ", bytes_ / 2), Log());
  ASSERT_TRUE(two.Declare(kModels).ok());
  for (int step = 0; step < 6; ++step) {
    for (int model = 0; model < kModels; ++model) {
      ASSERT_TRUE(calm_->Step(model, step).ok());
      const absl::Status status = two.StepAtLast(model, step);
      ASSERT_TRUE(status.ok()) << status;
    }
    if (step == 2) {
      for (int model = 0; model < kModels; ++model) {
        const auto saved = two.client->SaveCheckpoint(EvictedName(model));
        EXPECT_TRUE(saved.ok()) << saved.status();
      }
    }
    if (step % 2 == 1) {
      two.cluster->KillShard(step / 2 % kShards);
      ASSERT_TRUE(two.cluster->RestartShard(step / 2 % kShards).ok());
    }
  }
  for (int model = 0; model < kModels; ++model) {
    ASSERT_TRUE(two.StepAtLast(model, 6).ok());
    ASSERT_TRUE(calm_->Step(model, 6).ok());
    EXPECT_EQ(two.Tables(model), calm_->Tables(model)) << model;
  }
}

TEST_F(EvictionClusterTest, ADiskWithoutRoomIsAnErrorAndLosesNothing) {
  Trained two = StartFor(2, "spill_bytes: 1");
  const absl::Status refused = two.Declare(kModels);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("eviction.spill_bytes"));
  ASSERT_EQ(two.models.size(), 2u);
  for (int step = 0; step < 3; ++step) {
    for (int model = 0; model < 2; ++model) {
      ASSERT_TRUE(calm_->Step(model, step).ok());
      ASSERT_TRUE(two.Step(model, step).ok());
    }
  }
  EXPECT_EQ(two.Declare(kModels).code(), absl::StatusCode::kResourceExhausted);
  for (int model = 0; model < 2; ++model) EXPECT_EQ(two.Tables(model), calm_->Tables(model));
  // With one of them gone, there is room.
  EXPECT_TRUE(two.client->DropModel(EvictedName(0)).ok());
  two.models.erase(two.models.begin());
  EXPECT_TRUE(two.client->DeclareModel(MixedModel(EvictedName(2))).ok());
  EXPECT_EQ(two.Tables(0), calm_->Tables(1));
}

TEST_F(EvictionClusterTest, AFolderThatCannotBeMadeIsSaidAtTheStart) {
  const auto started = Cluster::Start(
      {.shards = 1, .embedded = true, .config = "eviction { spill_folder: \"/dev/null/x\" }"});
  EXPECT_FALSE(started.ok());
}

}  // namespace eviction_cluster_test

Shown Emberctl(const Cluster& cluster, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "emberctl");
  arguments.insert(arguments.end(), {"-a", cluster.address()});
  std::vector<const char*> argv;
  argv.reserve(arguments.size());
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str() + err.str()};
}

}  // namespace emberd::testing
