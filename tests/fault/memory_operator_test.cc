// What operators do with the memory of SparseCores (AdminService.ChangeMemory), on clusters with
// more models than it holds. Catches: a pin that only one shard has, or that does not outlast what
// it should; an operation that loses rows; an answer that tells of what was not done.
//
// Covers: client/emberctl/verbs/memory.cc
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "client/cpp/model_codec.h"
#include "client/emberctl/emberctl.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/eviction_cluster.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace memory_operator_test {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Change = v1::ChangeMemoryRequest;

struct Changed {
  grpc::Status status;
  v1::ChangeMemoryResponse response;
};
Changed ChangeMemory(const Cluster& cluster, Change::Operation operation,
                     const std::string& model = "") {
  Change request;
  request.set_operation(operation);
  request.set_model(model);
  Changed changed;
  changed.status = Call(&v1::AdminService::Stub::ChangeMemory, Api(cluster.address()), request,
                        &changed.response);
  return changed;
}

class MemoryOperatorTest : public EvictionCluster {
 protected:
  // OK, and the answer of every shard is there. (One that is not does not fit what follows.)
  static v1::ChangeMemoryResponse Do(const Trained& cluster, Change::Operation operation,
                                     const std::string& model = "") {
    Changed changed = ChangeMemory(*cluster.cluster, operation, model);
    EXPECT_TRUE(changed.status.ok()) << changed.status.error_message();
    for (int i = 0; i < changed.response.shards_size(); ++i) {
      EXPECT_EQ(changed.response.shards(i).shard(), i);
    }
    EXPECT_EQ(changed.response.shards_size(), kShards);
    if (changed.response.shards_size() != kShards) return {};
    return changed.response;
  }
  static v1::MemoryStatus MemoryOf(const Trained& cluster, int shard) {
    return ShardStatusOf(*cluster.cluster, shard).memory();
  }
  // On the SparseCores of the shard.
  static std::set<std::string> Resident(const Trained& cluster, int shard) {
    std::set<std::string> models;
    const v1::MemoryStatus memory = MemoryOf(cluster, shard);
    for (const v1::MemoryTable& table : memory.tables()) {
      if (table.place() == v1::MemoryTable::SPARSECORE) models.insert(table.model());
    }
    return models;
  }
  static std::set<std::string> Pinned(const Trained& cluster, int shard) {
    std::set<std::string> models;
    const v1::MemoryStatus memory = MemoryOf(cluster, shard);
    for (const v1::MemoryTable& table : memory.tables()) {
      if (table.pinned()) models.insert(table.model());
    }
    return models;
  }
  // Until the coordinator reaches the shard, which has read its log.
  static void AwaitRecovery(const Trained& cluster, int shard) {
    const auto recovered = [&] {
      const v1::GetStatusResponse status = StatusOf(*cluster.cluster);
      return status.shards(shard).reachable() && !status.shards(shard).log().recovering();
    };
    EXPECT_TRUE(Eventually(recovered));
  }
  // A use ends a moment after its step was answered, and what is in use cannot leave.
  static void AwaitNoUse(const Trained& cluster) {
    for (int shard = 0; shard < kShards; ++shard) {
      EXPECT_TRUE(Eventually([&] {
        const v1::MemoryStatus memory = MemoryOf(cluster, shard);
        return std::none_of(memory.tables().begin(), memory.tables().end(),
                            [](const v1::MemoryTable& table) { return table.uses() > 0; });
      }));
    }
  }
};

TEST_F(MemoryOperatorTest, APinnedModelStaysWhileOthersGo) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(kModels).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
  AwaitNoUse(two);
  const v1::ChangeMemoryResponse pinned = Do(two, Change::PIN, EvictedName(0));
  for (const v1::ShardMemoryChange& change : pinned.shards()) {
    EXPECT_TRUE(change.changed());
    EXPECT_TRUE(change.returned());
    EXPECT_THAT(change.evicted(), ElementsAre(EvictedName(1)));
    EXPECT_EQ(change.evicted_bytes(), bytes_);
    EXPECT_EQ(change.memory().pinned_bytes(), bytes_);
  }
  for (int step = 1; step < 4; ++step) {
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, step, {1, 2}));
    for (int shard = 0; shard < kShards; ++shard) {
      EXPECT_EQ(Resident(two, shard), (std::set<std::string>{EvictedName(0), EvictedName(2)}));
      EXPECT_EQ(Pinned(two, shard), (std::set<std::string>{EvictedName(0)}));
    }
  }
  ExpectRightTables(two, {0, 1, 2});
  EXPECT_FALSE(Do(two, Change::PIN, EvictedName(0)).shards(0).changed());
  EXPECT_TRUE(Do(two, Change::UNPIN, EvictedName(0)).shards(1).changed());
  EXPECT_FALSE(Do(two, Change::UNPIN, EvictedName(0)).shards(1).changed());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 4, {1, 2}));
  for (int shard = 0; shard < kShards; ++shard) {
    EXPECT_EQ(Resident(two, shard), (std::set<std::string>{EvictedName(1), EvictedName(2)}));
  }
  ExpectRightTables(two, {0, 1, 2});
}

TEST_F(MemoryOperatorTest, APinThatDoesNotFitSaysHowMuch) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(kModels).ok());
  AwaitNoUse(two);
  Do(two, Change::PIN, EvictedName(0));
  Do(two, Change::PIN, EvictedName(1));
  const Changed refused = ChangeMemory(*two.cluster, Change::PIN, EvictedName(2));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.status.error_message(),
              HasSubstr(absl::StrCat("model 'mixed-2' cannot be pinned: it needs ", bytes_,
                                     " bytes in every partition; ", 2 * bytes_,
                                     " of the budget of ", BytesFor(2))));
  const absl::Status lookup = two.Step(2, 0);
  EXPECT_EQ(lookup.code(), absl::StatusCode::kResourceExhausted) << lookup;
  EXPECT_THAT(std::string(lookup.message()),
              HasSubstr(absl::StrCat(2 * bytes_, " of them by pinned models")));
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1}));
  ExpectRightTables(two, {0, 1});
  Do(two, Change::UNPIN, EvictedName(1));
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {2}));
  ExpectRightTables(two, {0, 1, 2});
}

TEST_F(MemoryOperatorTest, CompactionMovesTheFreeBytesTogether) {
  Trained four = StartFor(4);
  ASSERT_TRUE(calm_->Declare(4).ok());
  ASSERT_TRUE(four.Declare(4).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(four, 0, {0, 1, 2, 3}));
  for (const int model : {0, 2}) EXPECT_TRUE(four.client->DropModel(EvictedName(model)).ok());
  for (int shard = 0; shard < kShards; ++shard) {
    const v1::MemoryStatus memory = MemoryOf(four, shard);
    EXPECT_EQ(memory.free_bytes(), BytesFor(2));
    EXPECT_EQ(memory.largest_gap_bytes(), bytes_);
  }
  const v1::ChangeMemoryResponse done = Do(four, Change::COMPACT);
  for (const v1::ShardMemoryChange& change : done.shards()) {
    EXPECT_TRUE(change.changed());
    EXPECT_GT(change.moved_tables(), 0);
    EXPECT_THAT(change.evicted(), IsEmpty());
    EXPECT_EQ(change.memory().largest_gap_bytes(), BytesFor(2));
    EXPECT_EQ(change.memory().evictions(), 0);
  }
  ExpectRightTables(four, {1, 3});
  ASSERT_NO_FATAL_FAILURE(TrainBoth(four, 1, {1, 3}));
  ExpectRightTables(four, {1, 3});
}

TEST_F(MemoryOperatorTest, ReleaseEmptiesWhatIsNotPinned) {
  Trained three = StartFor(3);
  ASSERT_TRUE(three.Declare(kModels).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(three, 0, {0, 1, 2}));
  AwaitNoUse(three);
  Do(three, Change::PIN, EvictedName(1));
  const v1::ChangeMemoryResponse done = Do(three, Change::RELEASE);
  for (const v1::ShardMemoryChange& change : done.shards()) {
    EXPECT_THAT(change.evicted(), ElementsAre(EvictedName(0), EvictedName(2)));
    EXPECT_EQ(change.evicted_bytes(), 2 * bytes_);
    EXPECT_EQ(change.memory().free_bytes(), BytesFor(2));
  }
  Do(three, Change::UNPIN, EvictedName(1));
  Do(three, Change::RELEASE);
  for (int shard = 0; shard < kShards; ++shard) {
    EXPECT_THAT(Resident(three, shard), IsEmpty());
    EXPECT_EQ(MemoryOf(three, shard).free_bytes(), BytesFor(3));
  }
  EXPECT_FALSE(Do(three, Change::RELEASE).shards(0).changed());
  ExpectRightTables(three, {0, 1, 2});
  ASSERT_NO_FATAL_FAILURE(TrainBoth(three, 1, {2, 1, 0}));
  ExpectRightTables(three, {0, 1, 2});
}

TEST_F(MemoryOperatorTest, WrongRequestsChangeNothing) {
  const Changed off = ChangeMemory(*calm_->cluster, Change::PIN, EvictedName(0));
  EXPECT_EQ(off.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(off.status.error_message(), HasSubstr("write `eviction { spill_folder: "));
  EXPECT_EQ(ChangeMemory(*calm_->cluster, Change::RELEASE).status.error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(2).ok());
  for (const auto operation : {Change::PIN, Change::UNPIN}) {
    const Changed unknown = ChangeMemory(*two.cluster, operation, "mixed-7");
    EXPECT_EQ(unknown.status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(unknown.status.error_message(), HasSubstr("'mixed-7'"));
  }
  const auto invalid = [&](Change::Operation operation, const std::string& model,
                           const std::string& message) {
    const Changed wrong = ChangeMemory(*two.cluster, operation, model);
    EXPECT_EQ(wrong.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(wrong.status.error_message(), message);
  };
  invalid(Change::OPERATION_UNSPECIFIED, "",
          "operation is 0; it must be PIN, UNPIN, COMPACT or RELEASE");
  invalid(static_cast<Change::Operation>(9), "",
          "operation is 9; it must be PIN, UNPIN, COMPACT or RELEASE");
  invalid(Change::PIN, "", "model is empty; PIN needs a name");
  invalid(Change::RELEASE, EvictedName(0),
          "model is 'mixed-0'; RELEASE is about all models: leave it empty");
  EXPECT_EQ(Resident(two, 0).size(), 2u);
  EXPECT_THAT(Pinned(two, 0), IsEmpty());
}

TEST_F(MemoryOperatorTest, APinThatOneShardCannotMakeIsTakenBack) {
  Trained two = StartFor(2, "", Log());
  ASSERT_TRUE(two.Declare(2).ok());
  two.cluster->KillShard(1);
  const Changed refused = ChangeMemory(*two.cluster, Change::PIN, EvictedName(0));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("shard 1"));
  EXPECT_THAT(Pinned(two, 0), IsEmpty());
  ASSERT_TRUE(two.cluster->RestartShard(1).ok());
  // What was pinned before stays so.
  ASSERT_TRUE(two.StepAtLast(0, 0).ok());
  Do(two, Change::PIN, EvictedName(0));
  two.cluster->KillShard(1);
  EXPECT_FALSE(ChangeMemory(*two.cluster, Change::PIN, EvictedName(0)).status.ok());
  EXPECT_EQ(Pinned(two, 0), std::set<std::string>{EvictedName(0)});
}

// A reset would give the pin to all shards.
TEST_F(MemoryOperatorTest, APinOfAModelThatIsLostIsTakenBack) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(1).ok());
  two.cluster->KillShard(1);
  ASSERT_TRUE(two.cluster->RestartShard(1).ok());
  EXPECT_TRUE(Eventually([&] {
    const v1::GetStatusResponse status = StatusOf(*two.cluster);
    return status.models_size() == 1 && !status.models(0).lost().empty();
  }));
  const Changed refused = ChangeMemory(*two.cluster, Change::PIN, EvictedName(0));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_THAT(Pinned(two, 0), IsEmpty());
}

TEST_F(MemoryOperatorTest, PinsOutlastRestartsWithALog) {
  Trained two = StartFor(2, "", Log());
  ASSERT_TRUE(two.Declare(kModels).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
  Do(two, Change::PIN, EvictedName(0));
  Do(two, Change::PIN, EvictedName(1));
  Do(two, Change::UNPIN, EvictedName(1));
  const std::set<std::string> pinned = {EvictedName(0)};
  // Once from the record, once from the state that begins the next segment.
  for (int round = 0; round < 2; ++round) {
    for (int shard = 0; shard < kShards; ++shard) {
      two.cluster->KillShard(shard);
      ASSERT_TRUE(two.cluster->RestartShard(shard).ok());
      AwaitRecovery(two, shard);
      EXPECT_EQ(Pinned(two, shard), pinned);
      EXPECT_EQ(Resident(two, shard).count(EvictedName(0)), 1u);
    }
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1 + round, {1, 2}));
    for (int shard = 0; shard < kShards; ++shard) {
      EXPECT_EQ(Resident(two, shard).count(EvictedName(0)), 1u);
    }
    ExpectRightTables(two, {0, 1, 2});
  }
  // New rows of the model are pinned too, wherever they come from, until it is dropped.
  ASSERT_TRUE(two.client->SaveCheckpoint(EvictedName(0)).ok());
  ASSERT_TRUE(two.client->RestoreCheckpoint(EvictedName(0)).ok());
  for (int shard = 0; shard < kShards; ++shard) EXPECT_EQ(Pinned(two, shard), pinned);
  EXPECT_EQ(two.Tables(0), calm_->Tables(0));
  ASSERT_TRUE(two.client->ResetModel(EvictedName(0)).ok());
  for (int shard = 0; shard < kShards; ++shard) EXPECT_EQ(Pinned(two, shard), pinned);
  ASSERT_TRUE(two.client->DropModel(EvictedName(0)).ok());
  ASSERT_TRUE(two.client->DeclareModel(MixedModel(EvictedName(0))).ok());
  for (int shard = 0; shard < kShards; ++shard) EXPECT_THAT(Pinned(two, shard), IsEmpty());
}

TEST_F(MemoryOperatorTest, APinThatNoLongerFitsAfterARestartIsGivenUp) {
  {
    Trained two = StartFor(2, "", Log());
    ASSERT_TRUE(two.Declare(2).ok());
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1}));
    for (const int model : {0, 1}) Do(two, Change::PIN, EvictedName(model));
  }
  {
    Trained one = StartFor(1, "", Log());
    ASSERT_TRUE(one.Declare(2).ok());
    for (int shard = 0; shard < kShards; ++shard) {
      EXPECT_EQ(Pinned(one, shard), std::set<std::string>{EvictedName(0)});
      EXPECT_THAT(one.cluster->ShardLog(shard),
                  HasSubstr("a model that was pinned is not pinned any more"));
    }
    Do(one, Change::UNPIN, EvictedName(0));
    ExpectRightTables(one, {0, 1});
  }
  // Nor does it come back later.
  Trained again = StartFor(2, "", Log());
  ASSERT_TRUE(again.Declare(2).ok());
  for (int shard = 0; shard < kShards; ++shard) EXPECT_THAT(Pinned(again, shard), IsEmpty());
}

TEST_F(MemoryOperatorTest, WithoutALogAShardHasThePinsOfTheOthers) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(2).ok());
  Do(two, Change::PIN, EvictedName(0));
  two.cluster->KillShard(1);
  ASSERT_TRUE(two.cluster->RestartShard(1).ok());
  const absl::Status reset = Await([&] { return two.client->ResetModel(EvictedName(0)); });
  ASSERT_TRUE(reset.ok()) << reset;
  for (int shard = 0; shard < kShards; ++shard) {
    EXPECT_EQ(Pinned(two, shard), std::set<std::string>{EvictedName(0)});
  }
}

// A model of which one table is PINNED stays, without an operator, whenever it is made; a model
// that serves its checkpoint may leave.
TEST_F(MemoryOperatorTest, ATableIsPinnedInItsModelsDescription) {
  Trained two = StartFor(2, "", Log());
  auto config = client::EncodeModel(MixedModel(EvictedName(0)));
  ASSERT_TRUE(config.ok()) << config.status();
  config->mutable_tables(1)->set_residency(v1::PINNED);
  const auto declared = two.client->DeclareModel(config->DebugString());
  ASSERT_TRUE(declared.ok()) << declared.status();
  two.models.push_back(*declared);
  ASSERT_TRUE(two.Declare(kModels).ok());
  const std::set<std::string> pinned = {EvictedName(0)};
  const auto expect_pinned = [&] {
    for (int shard = 0; shard < kShards; ++shard) EXPECT_EQ(Pinned(two, shard), pinned);
  };
  for (int step = 0; step < 2; ++step) {
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, step, {0, 1, 2}));
    expect_pinned();
  }
  const double pinned_bytes =
      static_cast<double>(bytes_) * ShardStatusOf(*two.cluster, 0).partitions_size();
  EXPECT_TRUE(Eventually([&] {
    return MetricSum(FetchMetrics(two.cluster->shard_http_address(0)),
                     "emberd_table_pinned_bytes") == pinned_bytes;
  })) << pinned_bytes;

  two.cluster->KillShard(1);
  ASSERT_TRUE(two.cluster->RestartShard(1).ok());
  AwaitRecovery(two, 1);
  expect_pinned();
  ASSERT_TRUE(two.client->SaveCheckpoint(EvictedName(0)).ok());
  for (int shard = 0; shard < kShards; ++shard) Do(two, Change::UNPIN, EvictedName(0));
  for (int shard = 0; shard < kShards; ++shard) EXPECT_THAT(Pinned(two, shard), IsEmpty());
  ASSERT_TRUE(two.client->RestoreCheckpoint(EvictedName(0)).ok());
  expect_pinned();
  ExpectRightTables(two, {0, 1, 2});
  ASSERT_TRUE(two.client->ServeCheckpoint(EvictedName(0), {.serve_as = "copy"}).ok());
  expect_pinned();
}

TEST_F(MemoryOperatorTest, EmberctlActsAndTells) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(kModels).ok());
  AwaitNoUse(two);
  const auto run = [&](const std::vector<std::string>& arguments, int code = emberctl::kOk) {
    const Shown shown = Emberctl(*two.cluster, arguments);
    EXPECT_EQ(shown.code, code) << shown.text;
    return shown.text;
  };
  EXPECT_THAT(
      run({"memory", "pin", EvictedName(0)}),
      AllOf(ContainsRegex("shard 0: pinned; brought in; evicted: mixed-1 \\([^)]+\\); on each "
                          "SparseCore 48.0 KiB of [^,]+ free, 48.0 KiB in one piece, "
                          "[^,]+ pinned\n"),
            HasSubstr("\nshard 1: pinned; brought in; ")));
  EXPECT_THAT(run({"memory"}),
              AllOf(ContainsRegex("mixed-0 [^\n]+ yes\n"), ContainsRegex("mixed-2 [^\n]+ no\n")));
  EXPECT_THAT(run({"memory", "pin", EvictedName(0)}), HasSubstr("shard 0: was pinned already; "));
  EXPECT_THAT(run({"memory", "release"}), HasSubstr("shard 1: evicted: mixed-2 ("));
  EXPECT_THAT(run({"memory", "release"}), HasSubstr("shard 1: nothing to evict; "));
  EXPECT_THAT(run({"memory", "compact"}), ContainsRegex("shard 0: [0-9]+ tables? moved; "));
  EXPECT_THAT(run({"memory", "unpin", EvictedName(0)}), HasSubstr(": may be evicted again; "));
  EXPECT_THAT(run({"memory", "unpin", EvictedName(0)}), HasSubstr(": was not pinned; "));
  const auto json = emberctl::Json::parse(run({"memory", "compact", "--json"}));
  EXPECT_EQ(json["shards"].size(), size_t{kShards});
  EXPECT_THAT(run({"memory", "pin", "mixed-7"}, emberctl::kRefused), HasSubstr("NOT_FOUND"));
}

}  // namespace memory_operator_test
}  // namespace emberd::testing
