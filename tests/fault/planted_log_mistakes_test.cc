// Mistakes around the log of a shard (storage.durability LOG) that shards are told to make, each
// with what finds it; the same run goes right without. README.md here lists them.
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "server/log/log_files.h"
#include "server/log/testing/forgetful_files.h"
#include "server/log/testing/records.h"
#include "tests/fault/counting_cluster.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace planted_log_mistakes_test {

constexpr int kShards = 2;
constexpr char kDiesBetweenWords[] = "update.word_is_said=die:300@1";

// The folder of a machine that can lose power.
std::string MachineIn(const std::string& folder) { return folder + "/machine"; }

void KillShards(CountingCluster& cluster) {
  for (int i = 0; i < kShards; ++i) cluster.cluster().KillShard(i);
}

absl::Status BringShardsBack(CountingCluster& cluster) {
  for (int i = 0; i < kShards; ++i) RETURN_IF_ERROR(cluster.cluster().RestartShard(i));
  // A shard that cannot use its log says so, and goes on saying it.
  const absl::Status back =
      Await([&] { return cluster.Lookup(cluster.other()).status(); },
            [](const absl::Status& status) {
              return status.ok() || absl::IsFailedPrecondition(status) || absl::IsDataLoss(status);
            });
  if (!absl::IsFailedPrecondition(back)) return back;
  return absl::DataLossError(absl::StrCat("a shard does not come back: ", back.message()));
}

absl::Status LoseShards(CountingCluster& cluster) {
  KillShards(cluster);
  return BringShardsBack(cluster);
}

absl::Status ExpectCounts(CountingCluster& cluster, float times) {
  const std::vector<float> counts = cluster.Counts(cluster.other());
  if (counts.empty()) return absl::InternalError("the rows cannot be read");
  for (const float count : counts) {
    if (count == times) continue;
    return absl::DataLossError(absl::StrCat("rows were updated ", absl::StrJoin(counts, ", "),
                                            " times; each should have been ", times, " times"));
  }
  return absl::OkStatus();
}

absl::Status Update(CountingCluster& cluster, uint64_t sequence) {
  ASSIGN_OR_RETURN(const client::LookupResult found, cluster.Lookup(cluster.other()));
  return cluster.Apply(cluster.other(), found.batch, sequence).status();
}

absl::Status Save(CountingCluster& cluster) {
  return cluster.other().SaveCheckpoint(cluster.model().name, {.name = "mine"}).status();
}

// The coordinator dies between its words: one shard has made the update, the other one holds it.
// Then both shards are killed, and the trainer goes on through the other coordinator.
absl::Status LoseAllInDoubt(CountingCluster& cluster, const std::string&) {
  // A coordinator that saves the model by itself decides what is in doubt: it has nothing to save.
  RETURN_IF_ERROR(Save(cluster));
  ASSIGN_OR_RETURN(const client::LookupResult found, cluster.Lookup(cluster.first()));
  if (cluster.Apply(cluster.first(), found.batch, 1).ok()) {
    return absl::InternalError("its coordinator should have died");
  }
  RETURN_IF_ERROR(LoseShards(cluster));
  RETURN_IF_ERROR(Await([&] { return cluster.Retry(found.batch, 1); }).status());
  return ExpectCounts(cluster, 1);
}

absl::Status LoseAllAfterAnUpdate(CountingCluster& cluster, const std::string&) {
  RETURN_IF_ERROR(Update(cluster, 1));
  RETURN_IF_ERROR(LoseShards(cluster));
  return ExpectCounts(cluster, 1);
}

// A checkpoint, an update behind it, and the retry of one before it.
absl::Status LoseAllAfterACheckpoint(CountingCluster& cluster, const std::string&) {
  RETURN_IF_ERROR(Update(cluster, 1));
  RETURN_IF_ERROR(Save(cluster));
  RETURN_IF_ERROR(Update(cluster, 2));
  RETURN_IF_ERROR(LoseShards(cluster));
  RETURN_IF_ERROR(ExpectCounts(cluster, 2));
  // Through the coordinator that has not seen the first try.
  ASSIGN_OR_RETURN(const client::LookupResult again, cluster.Lookup(cluster.first()));
  RETURN_IF_ERROR(cluster.Apply(cluster.first(), again.batch, 1).status());
  return ExpectCounts(cluster, 2);
}

// The shards die while their second checkpoint is being written. The first one is that of the new
// model, which a coordinator saves by itself: it must not come between the update and the other.
absl::Status LoseAllDuringACheckpoint(CountingCluster& cluster, const std::string&) {
  const auto first =
      Await([&] { return cluster.other().ListCheckpoints(cluster.model().name); },
            [](const auto& list) { return list.ok() && !list->checkpoints.empty(); });
  RETURN_IF_ERROR(first.status());
  RETURN_IF_ERROR(Update(cluster, 1));
  if (Save(cluster).ok()) return absl::InternalError("a shard should have died");
  RETURN_IF_ERROR(LoseShards(cluster));
  return ExpectCounts(cluster, 1);
}

// The order of updates shows in the bits of a real optimizer.
absl::Status CompareWithUndisturbed(CountingCluster& cluster, const std::string&) {
  const client::ModelDescription mixed = MixedModel("mixed");
  ASSIGN_OR_RETURN(const client::Model model, cluster.other().DeclareModel(mixed));
  for (int step = 0; step < 6; ++step) {
    RETURN_IF_ERROR(TrainStep(cluster.other(), model, step, 32));
  }
  ASSIGN_OR_RETURN(const std::string before, Digest(cluster.other(), model));
  RETURN_IF_ERROR(LoseShards(cluster));
  ASSIGN_OR_RETURN(const std::string after, Await([&] { return Digest(cluster.other(), model); }));
  return after == before ? absl::OkStatus() : absl::DataLossError("the tables are others now");
}

// Which way a number is rounded follows from how many updates its stack has seen.
absl::Status CompareRounding(CountingCluster& cluster, const std::string&) {
  const char* const text = R"(
      name: "rounded"
      optimizer { adagrad {} learning_rate: 0.1 }
      tables { name: "t" vocabulary_size: 64 embedding_dim: 8 storage_dtype: BFLOAT16
               update_rounding: STOCHASTIC }
      features { name: "f" table: "t" batch_size: 16 })";
  const std::vector<int64_t> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  const std::vector<float> gradients(ids.size() * 8, 0.37f);
  ASSIGN_OR_RETURN(const client::Model model, cluster.other().DeclareModel(text));
  const auto update = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(
        const client::LookupResult found,
        cluster.other().Lookup(model, {{"f", client::DenseIds{absl::MakeConstSpan(ids), 1}}}));
    return cluster.other()
        .ApplyGradients(model, found.batch, {{.feature = "f", .values = gradients, .samples = 16}})
        .status();
  };
  const auto run = [&](bool disturbed) -> absl::StatusOr<std::string> {
    for (int i = 0; i < 3; ++i) RETURN_IF_ERROR(update());
    if (disturbed) {
      RETURN_IF_ERROR(cluster.other().SaveCheckpoint("rounded", {.name = "mine"}).status());
      RETURN_IF_ERROR(LoseShards(cluster));
    }
    for (int i = 0; i < 3; ++i) RETURN_IF_ERROR(update());
    return Digest(cluster.other(), model);
  };
  ASSIGN_OR_RETURN(const std::string calm, run(false));
  RETURN_IF_ERROR(cluster.other().ResetModel("rounded"));
  ASSIGN_OR_RETURN(const std::string disturbed, run(true));
  return disturbed == calm ? absl::OkStatus() : absl::DataLossError("rounded in another way");
}

// With fsync ALWAYS a machine without power loses nothing that was answered.
absl::Status LosePowerAfterUpdates(CountingCluster& cluster, const std::string& folder) {
  for (uint64_t update = 1; update <= 4; ++update) {
    RETURN_IF_ERROR(Update(cluster, update));
    KillShards(cluster);
    RETURN_IF_ERROR(log::LosePower(MachineIn(folder), /*seed=*/update).status());
    RETURN_IF_ERROR(BringShardsBack(cluster));
    RETURN_IF_ERROR(ExpectCounts(cluster, static_cast<float>(update)));
  }
  return absl::OkStatus();
}

// Adds the first half of a vote to a log, as a kill in the middle of writing it does.
absl::Status TearTail(const std::string& log) {
  ASSIGN_OR_RETURN(const log::WholeLog whole, log::ReadWhole(log));
  const log::LogPosition& last = whole.records.back().position;
  const std::string path = absl::StrCat(log, "/", log::RecordsName(last.segment));
  ASSIGN_OR_RETURN(const auto head, log::DecodeLogHead(ReadFile(path)));
  if (!head.has_value()) return absl::InternalError(path + " has no head");
  internal::v1::LogBlob blob;
  blob.set_segment(last.segment);
  blob.set_bytes(1000);
  std::string frame = log::FrameFor(log::VoteRecord(/*number=*/1, blob));
  log::SealFrame(head->salt, whole.end.next_sequence, last.durable, &frame);
  const int64_t half = (log::kFrameHeadBytes + static_cast<int64_t>(frame.size())) / 2;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(last.offset + last.bytes);
  file.write(frame.data(), half);
  file.close();
  return file.good() ? absl::OkStatus() : absl::InternalError(path + " cannot be written");
}

absl::Status LoseAllInTheMiddleOfARecord(CountingCluster& cluster, const std::string& folder) {
  RETURN_IF_ERROR(Update(cluster, 1));
  KillShards(cluster);
  for (int i = 0; i < kShards; ++i) {
    RETURN_IF_ERROR(TearTail(absl::StrCat(folder, "/shard-000", i, "/log")));
  }
  RETURN_IF_ERROR(BringShardsBack(cluster));
  RETURN_IF_ERROR(Update(cluster, 2));
  return ExpectCounts(cluster, 2);
}

struct Planted {
  const char* name;  // see Mistake in base/failpoint.h
  // `folder`: the storage.directory.
  absl::Status (*run)(CountingCluster& cluster, const std::string& folder);
  const char* coordinator = "";  // other failpoints, of the first one
  const char* shard = "";        // the same, of shards in their first life
  bool loses_power = false;      // the machine of the shards, which then sync always
};

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

const Planted kPlanted[] = {
    {"log.append_after_vote", LoseAllInDoubt, kDiesBetweenWords},
    {"log.vote_lost", LoseAllInDoubt, kDiesBetweenWords},
    {"log.no_decision", LoseAllAfterAnUpdate},
    {"log.records_not_in_state", LoseAllAfterACheckpoint},
    {"log.segment_off_by_one", LoseAllAfterACheckpoint},
    {"log.dropped_before_checkpoint", LoseAllDuringACheckpoint, "", "save.rows_are_here=die@2"},
    {"log.replayed_out_of_order", CompareWithUndisturbed},
    {"log.rounding_not_restored", CompareRounding},
    {"log.not_synced", LosePowerAfterUpdates, "", "", /*loses_power=*/true},
    {"log.checksum_not_asked", LoseAllInTheMiddleOfARecord},
};

class PlantedLogMistakesTest : public ::testing::TestWithParam<Planted> {
 protected:
  // What a run finds to be wrong.
  absl::Status Run(bool mistaken) {
    const Planted& planted = GetParam();
    std::string shard = planted.shard;
    if (mistaken) {
      const std::string mistake = absl::StrCat(planted.name, "=mistake");
      // What dies on purpose does so in its first life alone.
      shard =
          shard.empty() ? absl::StrCat("every life: ", mistake) : absl::StrCat(shard, ",", mistake);
    }
    const TempDir folder = *TempDir::Create();
    std::map<std::string, std::string> failpoints;
    if (*planted.coordinator != '\0') failpoints["coordinator-0"] = planted.coordinator;
    if (!shard.empty()) failpoints["shard-0"] = failpoints["shard-1"] = shard;
    const std::string storage =
        absl::StrCat("storage { directory: '", folder.path(), "' durability: LOG ",
                     planted.loses_power ? "fsync: ALWAYS " : "", "log_bytes: 1099511627776 }");
    ASSIGN_OR_RETURN(const auto cluster,
                     CountingCluster::Start(failpoints, "shard_call_ms: 10000", storage,
                                            planted.loses_power ? MachineIn(folder.path()) : ""));
    return planted.run(*cluster, folder.path());
  }
};

INSTANTIATE_TEST_SUITE_P(Mistakes, PlantedLogMistakesTest, ::testing::ValuesIn(kPlanted),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = c == '.' ? '_' : c;
                           return name;
                         });

TEST_P(PlantedLogMistakesTest, IsFound) {
  const absl::Status status = Run(/*mistaken=*/true);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  RecordProperty("found", status.ToString());
}

TEST_P(PlantedLogMistakesTest, AndNothingElseIs) {
  const absl::Status status = Run(/*mistaken=*/false);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace planted_log_mistakes_test
}  // namespace emberd::testing
