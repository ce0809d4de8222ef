// What trainers and operators rely on when they restore: requests from before the checkpoint are
// not carried out again and those from after it are, on whatever shards; a model may come back with
// another storage type or another optimizer; a declaration may ask for rows of a checkpoint.
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/substitute.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace checkpoint_use_test {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr char kTrainer[] = "trainer";

class CheckpointUseTest : public ::testing::Test {
 protected:
  // `trainer`: its client_id; empty: a new one.
  void Start(int shards, int sparsecores, bool embedded = true, const std::string& trainer = "") {
    client_.reset();
    cluster_.reset();
    auto cluster = Cluster::Start(
        {.shards = shards,
         .sparsecores_per_shard = sparsecores,
         .embedded = embedded,
         .config = absl::StrCat("storage { directory: \"", storage_.path(), "\" }")});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client::ClientOptions options = cluster_->client_options();
    options.client_id = trainer;
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  template <typename Description>
  void Declare(const Description& description, const client::DeclareOptions& options = {}) {
    auto model = client_->DeclareModel(description, options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  void Save(const std::string& name) {
    auto saved = client_->SaveCheckpoint(model_.name, {.name = name});
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  void Restore(const std::string& model, const client::RestoreOptions& options) {
    auto restored = client_->RestoreCheckpoint(model, options);
    ASSERT_TRUE(restored.ok()) << restored.status();
    auto described = client_->DescribeModel(model);
    ASSERT_TRUE(described.ok()) << described.status();
    model_ = *std::move(described);
  }
  std::string TableDigest() {
    auto digest = Digest(*client_, model_);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }
  std::vector<float> Rows(const std::string& table, const std::string& slot = "") {
    std::vector<int64_t> ids(model_.FindTable(table)->vocabulary_size);
    std::iota(ids.begin(), ids.end(), 0);
    auto rows = client_->ReadRows(model_, table, ids, slot);
    EXPECT_TRUE(rows.ok()) << rows.status();
    return rows.ok() ? rows->values : std::vector<float>();
  }

  // An update of MixedModel under a number, with a batch of its own.
  absl::StatusOr<client::ApplyResult> Update(uint64_t sequence) {
    const std::vector<OwnedIds> batch = MixedBatch(sequence, 20);
    auto found = client_->Lookup(model_, Features(batch));
    if (!found.ok()) return found.status();
    last_batch_ = found->batch;
    client::ApplyOptions options;
    options.sequence = sequence;
    const auto gradients = MixedGradients(sequence, *found);
    return client_->ApplyGradients(model_, found->batch, Gradients(*found, gradients), options);
  }
  void ExpectUpdate(uint64_t sequence, bool replayed) {
    auto update = Update(sequence);
    ASSERT_TRUE(update.ok()) << update.status();
    EXPECT_EQ(update->replayed, replayed) << sequence;
  }
  // A new cluster, and a stream of a model.
  void StartStream() {
    Start(2, 2);
    Declare(MixedModel("mixed"));
    auto stream = client_->Train(model_, {.group = "run"});
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }
  // The next one of the stream.
  void Step(const client::UpdateOptions& options = {}) {
    const int64_t number = next_step_++;
    ASSERT_TRUE(stream_->SendLookup(number, Features(MixedBatch(1, 20))).ok());
    ASSERT_TRUE(stream_->ReceiveLookup().ok());
    ASSERT_TRUE(stream_->SendUpdate(number, {}, options).ok());
    const auto updated = stream_->ReceiveUpdate();
    ASSERT_TRUE(updated.ok()) << updated.status();
    EXPECT_EQ(updated->rows_updated > 0, !options.skip);
  }
  void ExpectAssign(uint64_t sequence, bool replayed) {
    client::AssignOptions options;
    options.sequence = sequence;
    const std::vector<float> row(16, static_cast<float>(sequence));
    auto before = client_->AssignRows(model_, "users", {3}, row, options);
    ASSERT_TRUE(before.ok()) << before.status();
    EXPECT_EQ(*before, replayed) << sequence;
  }

  const TempDir storage_ = *TempDir::Create();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
  client::BatchHandle last_batch_;
  std::unique_ptr<client::TrainStream> stream_;
  int64_t next_step_ = 0;
};

TEST_F(CheckpointUseTest, RetriesAreAnsweredFromTheTimeOfTheCheckpoint) {
  Start(4, 2, /*embedded=*/false, kTrainer);
  Declare(MixedModel("mixed"));
  auto first = Update(100);
  ASSERT_TRUE(first.ok()) << first.status();
  const client::BatchHandle first_batch = last_batch_;
  ASSERT_NO_FATAL_FAILURE(ExpectAssign(7, false));
  const std::string at_checkpoint = TableDigest();
  Save("c");
  ASSERT_NO_FATAL_FAILURE(ExpectUpdate(101, false));
  ASSERT_NO_FATAL_FAILURE(ExpectAssign(8, false));
  const std::string after = TableDigest();
  ASSERT_NE(after, at_checkpoint);

  const auto expect_replays = [&] {
    EXPECT_EQ(TableDigest(), at_checkpoint);
    // As a trainer repeats it whose answer was lost: with the batch of then, and with a new one.
    client::ApplyOptions options;
    options.sequence = 100;
    auto again = client_->ApplyGradients(model_, first_batch, {}, options);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->replayed);
    EXPECT_EQ(again->rows_updated, first->rows_updated);
    ASSERT_NO_FATAL_FAILURE(ExpectUpdate(100, true));
    ASSERT_NO_FATAL_FAILURE(ExpectAssign(7, true));
    EXPECT_EQ(TableDigest(), at_checkpoint);
    ASSERT_NO_FATAL_FAILURE(ExpectUpdate(101, false));
    ASSERT_NO_FATAL_FAILURE(ExpectAssign(8, false));
    EXPECT_EQ(TableDigest(), after);
    ASSERT_NO_FATAL_FAILURE(ExpectUpdate(101, true));
    ASSERT_NO_FATAL_FAILURE(ExpectAssign(8, true));
    EXPECT_EQ(TableDigest(), after);
  };
  {
    SCOPED_TRACE("where it was saved");
    Restore("mixed", {.name = "c"});
    ASSERT_NO_FATAL_FAILURE(expect_replays());
  }
  for (const auto& [shards, sparsecores] : {std::pair(2, 4), std::pair(8, 1), std::pair(1, 8)}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards"));
    Start(shards, sparsecores, /*embedded=*/true, kTrainer);
    Restore("mixed", {});
    ASSERT_NO_FATAL_FAILURE(expect_replays());
  }
}

// What a trainer holds from before a restore is of no use any more, and says so.
TEST_F(CheckpointUseTest, BatchesAndStreamsFromBeforeARestoreEnd) {
  Start(2, 2, /*embedded=*/false);
  Declare(MixedModel("mixed"));
  Save("c");
  const std::vector<OwnedIds> batch = MixedBatch(1, 20);
  auto found = client_->Lookup(model_, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  const client::Model before = model_;
  auto stream = client_->Train(model_, {.group = "run"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  Restore("mixed", {});
  const auto gradients = MixedGradients(1, *found);
  const auto applied = client_->ApplyGradients(before, found->batch, Gradients(*found, gradients));
  EXPECT_FALSE(applied.ok());
  absl::Status ended = (*stream)->SendLookup(0, Features(batch));
  if (ended.ok()) ended = (*stream)->ReceiveLookup().status();
  EXPECT_TRUE(absl::IsAborted(ended)) << ended;
  ASSERT_NO_FATAL_FAILURE(ExpectUpdate(5, false));
}

// A step that was skipped is one of those that a checkpoint has seen.
TEST_F(CheckpointUseTest, ASkippedStepIsInTheCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(StartStream());
  ASSERT_NO_FATAL_FAILURE(Step());
  const std::string after_one = TableDigest();
  ASSERT_NO_FATAL_FAILURE(Step({.checkpoint = "k", .skip = true}));
  EXPECT_EQ(TableDigest(), after_one);
  ASSERT_NO_FATAL_FAILURE(Step());
  ASSERT_TRUE(stream_->Finish().ok());
  // It is written while training goes on.
  const absl::Status restored =
      Await([&] { return client_->RestoreCheckpoint("mixed", {.name = "k"}).status(); },
            [](const absl::Status& status) { return !absl::IsNotFound(status); });
  ASSERT_TRUE(restored.ok()) << restored;
  model_ = *client_->DescribeModel("mixed");
  EXPECT_EQ(TableDigest(), after_one);
  const auto stream = client_->Train(model_, {.group = "run"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), 2);
}

// Would catch: a failure that nobody hears of, because the stream ends before a result can tell of
// it, or nobody reads the result. And a log that is full of one mistake that each step makes.
TEST_F(CheckpointUseTest, TheLogTellsOfACheckpointOfAStreamThatFailed) {
  ASSERT_NO_FATAL_FAILURE(StartStream());
  constexpr size_t kSteps = 50;
  for (size_t i = 0; i < kSteps; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step({.checkpoint = "no/name", .skip = true}));
  }
  ASSERT_TRUE(stream_->Finish().ok());
  constexpr char kLine[] = "a checkpoint could not be saved";
  EXPECT_TRUE(Eventually([&] {
    const std::string log = cluster_->CoordinatorLog();
    return absl::StrContains(log, kLine) && absl::StrContains(log, "no/name");
  })) << cluster_->CoordinatorLog();
  const std::vector<std::string> around = absl::StrSplit(cluster_->CoordinatorLog(), kLine);
  EXPECT_LT(around.size(), kSteps);
}

// A script may save again at once; its second save wrote all its files, and was then refused.
TEST_F(CheckpointUseTest, SavesWithoutANameFollowEachOtherClosely) {
  Start(2, 2);
  Declare(MixedModel("mixed"));
  std::set<std::string> names;
  for (int k = 0; k < 3; ++k) {
    auto saved = client_->SaveCheckpoint("mixed");
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_THAT(saved->checkpoint.name, MatchesRegex("[0-9]{8}-[0-9]{6}[.][0-9]{3}"));
    names.insert(saved->checkpoint.name);
  }
  EXPECT_EQ(names.size(), 3);
}

// Its name was that of the step again: it wrote all its files, and was then refused.
TEST_F(CheckpointUseTest, ASaveWithoutANameMayFollowAtTheSameStep) {
  ASSERT_NO_FATAL_FAILURE(StartStream());
  ASSERT_NO_FATAL_FAILURE(Step());
  for (const char* name : {"step-1", "[0-9]{8}-[0-9]{6}[.][0-9]{3}"}) {
    const auto saved = client_->SaveCheckpoint("mixed");
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_THAT(saved->checkpoint.name, MatchesRegex(name));
  }
}

std::string OneTable(const std::string& storage, const std::string& optimizer) {
  return absl::Substitute(
      "name: 'one' tables { name: 't' vocabulary_size: 100 embedding_dim: 4 combiner: SUM $0 "
      "optimizer { $1 learning_rate: 0.1 } } features { name: 'f' table: 't' batch_size: 20 }",
      storage, optimizer);
}

class OtherConfigTest : public CheckpointUseTest {
 protected:
  // Rows 0, 2, 4, ... 38.
  void Train() {
    std::vector<int64_t> ids(20);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(2 * i);
    for (int step = 0; step < 3; ++step) {
      auto found = client_->Lookup(model_, {{"f", client::DenseIds{absl::MakeConstSpan(ids), 1}}});
      ASSERT_TRUE(found.ok()) << found.status();
      std::vector<float> gradient(ids.size() * 4);
      for (size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] = 0.37f * static_cast<float>(i % 7) - 0.5f;
      }
      ASSERT_TRUE(client_->ApplyGradients(model_, found->batch, {{"f", gradient, 20}}).ok());
    }
  }
};

TEST_F(OtherConfigTest, AnotherStorageTypeKeepsValuesAndSlots) {
  Start(2, 2);
  Declare(OneTable("storage_dtype: BFLOAT16 update_rounding: STOCHASTIC", "adagrad {}"));
  ASSERT_NO_FATAL_FAILURE(Train());
  const std::vector<float> weights = Rows("t"), slots = Rows("t", "accumulator");
  Save("c");
  // As many partitions, and others.
  for (const auto& [shards, sparsecores] : {std::pair(4, 1), std::pair(1, 8)}) {
    Start(shards, sparsecores);
    Restore("one", {.config = OneTable("storage_dtype: FLOAT32", "adagrad {}")});
    EXPECT_EQ(Rows("t"), weights);
    EXPECT_EQ(Rows("t", "accumulator"), slots);
    ASSERT_NO_FATAL_FAILURE(Train());
    EXPECT_NE(Rows("t"), weights);
  }
}

TEST_F(OtherConfigTest, AnotherOptimizerKeepsValuesAndBeginsWithItsOwnSlots) {
  Start(2, 2);
  Declare(OneTable("", "adagrad {}"));
  ASSERT_NO_FATAL_FAILURE(Train());
  const std::vector<float> weights = Rows("t");
  Save("c");
  Start(4, 1);
  for (const char* optimizer : {"sgd {}", "adam {}"}) {
    SCOPED_TRACE(optimizer);
    Restore("one", {.config = OneTable("", optimizer)});
    EXPECT_EQ(Rows("t"), weights);
    for (const std::string& slot : model_.FindTable("t")->slots) {
      EXPECT_THAT(Rows("t", slot), Each(0.0f)) << slot;
    }
    ASSERT_NO_FATAL_FAILURE(Train());
    ASSERT_TRUE(*client_->DropModel("one"));
  }
}

// Both have a slot "accumulator": one of a float for each column, the other for each row. Taken for
// one another, they are written beside their places.
TEST_F(OtherConfigTest, ASlotOfAnotherShapeBeginsAnew) {
  const auto config = [](const std::string& optimizer, float initial) {
    return OneTable("", absl::StrCat(optimizer, " { initial_accumulator: ", initial, " }"));
  };
  for (const auto& [from, to] :
       {std::pair("adagrad", "rowwise_adagrad"), std::pair("rowwise_adagrad", "adagrad")}) {
    SCOPED_TRACE(to);
    Start(2, 2);
    Declare(config(from, 0.5f));
    ASSERT_NO_FATAL_FAILURE(Train());
    const std::vector<float> weights = Rows("t");
    Save(from);
    // As many partitions, and others.
    for (const auto& [shards, sparsecores] : {std::pair(4, 1), std::pair(1, 8)}) {
      Start(shards, sparsecores);
      Restore("one", {.name = from, .config = config(to, 0.25f)});
      EXPECT_EQ(Rows("t"), weights);
      EXPECT_THAT(Rows("t", "accumulator"), Each(0.25f));
      ASSERT_NO_FATAL_FAILURE(Train());
      EXPECT_NE(Rows("t"), weights);
    }
  }
}

// An incremental checkpoint cannot build on one that has other slots: nobody could read it.
TEST_F(OtherConfigTest, WhatIsSavedUnderAnotherOptimizerCanBeRead) {
  Start(2, 2);
  Declare(OneTable("", "sgd {}"));
  ASSERT_NO_FATAL_FAILURE(Train());
  Save("c");
  Start(2, 2);
  Restore("one", {.config = OneTable("", "adagrad {}")});
  ASSERT_NO_FATAL_FAILURE(Train());
  const std::string trained = TableDigest();
  for (const std::string name : {"d", "e"}) {
    const auto saved = client_->SaveCheckpoint("one", {.name = name, .incremental = true});
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(saved->checkpoint.parent, name == "d" ? "" : "d");
    Restore("one", {.name = name});
    EXPECT_EQ(TableDigest(), trained);
  }
}

// On other partitions, and as a model of another id.
TEST_F(OtherConfigTest, RetriesAreAnsweredAllTheSame) {
  Start(2, 2, /*embedded=*/true, kTrainer);
  Declare(OneTable("storage_dtype: BFLOAT16", "adagrad {}"));
  const auto update = [&](uint64_t sequence) {
    const std::vector<int64_t> ids = {1, 2, 3, 4};
    client::ApplyOptions options;
    options.sequence = sequence;
    auto found = client_->Lookup(model_, {{"f", client::DenseIds{absl::MakeConstSpan(ids), 1}}});
    EXPECT_TRUE(found.ok()) << found.status();
    auto applied = client_->ApplyGradients(model_, found->batch,
                                           {{"f", std::vector<float>(16, 1.0f), 4}}, options);
    EXPECT_TRUE(applied.ok()) << applied.status();
    return applied.value_or(client::ApplyResult());
  };
  EXPECT_FALSE(update(100).replayed);
  Save("c");
  Start(8, 2, /*embedded=*/true, kTrainer);
  Restore("one", {.config = OneTable("storage_dtype: FLOAT32", "sgd {}")});
  const std::string before = TableDigest();
  const client::ApplyResult again = update(100);
  EXPECT_TRUE(again.replayed);
  EXPECT_EQ(again.rows_updated, 4);
  EXPECT_EQ(TableDigest(), before);
  EXPECT_FALSE(update(101).replayed);
  EXPECT_NE(TableDigest(), before);
}

TEST_F(OtherConfigTest, OtherTablesAreRefused) {
  Start(2, 2);
  Declare(OneTable("", "adagrad {}"));
  ASSERT_NO_FATAL_FAILURE(Train());
  Save("c");
  const std::string before = TableDigest();
  std::string wider = OneTable("", "adagrad {}");
  wider.replace(wider.find("embedding_dim: 4"), 16, "embedding_dim: 8");
  const absl::Status refused =
      client_->RestoreCheckpoint("one", {.name = "c", .config = wider}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("table \"t\" is 100 x 4"));
  EXPECT_EQ(TableDigest(), before);
}

// Rows of a larger or wider table would be written beside their places.
TEST_F(OtherConfigTest, ADeclarationOfOtherTablesTakesNoRows) {
  Start(2, 2);
  const std::string config = OneTable("", "adagrad {}");
  Declare(config);
  ASSERT_NO_FATAL_FAILURE(Train());
  Save("c");
  ASSERT_TRUE(*client_->DropModel("one"));
  for (const auto& [from, to] : {std::pair("vocabulary_size: 100", "vocabulary_size: 50"),
                                 std::pair("embedding_dim: 4", "embedding_dim: 2")}) {
    SCOPED_TRACE(to);
    const std::string other = absl::StrReplaceAll(config, {{from, to}});
    const absl::Status refused = client_->DeclareModel(other, {.restore_from = "newest"}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("table \"t\" is 100 x 4"));
    EXPECT_TRUE(absl::IsNotFound(client_->DescribeModel("one").status()));
  }
}

// Rows that nobody had touched are in no file, so they would be others.
TEST_F(OtherConfigTest, OtherInitialRowsAreRefused) {
  Start(2, 2);
  const std::string config = OneTable("", "adagrad {}");
  Declare(config);
  Save("c");
  const std::string uniform = absl::StrReplaceAll(
      config, {{"combiner", "initializer { uniform { lower: -2 upper: 2 } } combiner"}});
  for (const auto& [other, field] :
       {std::pair(absl::StrCat("seed: 5 ", config), "have seed 5"),
        std::pair(uniform, "initializer { uniform { lower: -2 upper: 2 } }; they must have")}) {
    const absl::Status restored =
        client_->RestoreCheckpoint("one", {.name = "c", .config = other}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(restored)) << restored;
    EXPECT_THAT(std::string(restored.message()), HasSubstr(field));
  }
  // Nothing is drawn by this seed.
  const std::string constant = absl::StrReplaceAll(
      config, {{"combiner", "initializer { constant { value: 2 } } combiner"}, {"'one'", "'two'"}});
  Declare(constant);
  Save("c");
  Start(2, 2);
  Restore("two", {.name = "c", .config = absl::StrCat("seed: 5 ", constant)});
}

TEST_F(OtherConfigTest, ADeclarationMayBeginWithACheckpoint) {
  Start(2, 2);
  const std::string config = OneTable("", "adagrad {}");
  Declare(config);
  const std::string initial = TableDigest();
  ASSERT_NO_FATAL_FAILURE(Train());
  const std::string first = TableDigest();
  Save("first");
  ASSERT_NO_FATAL_FAILURE(Train());
  const std::string second = TableDigest();
  Save("second");

  Start(1, 8);
  // A failed one leaves nothing behind.
  const absl::Status unknown = client_->DeclareModel(config, {.restore_from = "third"}).status();
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
  EXPECT_TRUE(absl::IsNotFound(client_->DescribeModel("one").status()));
  Declare(config, {.restore_from = "newest"});
  EXPECT_TRUE(model_.created);
  EXPECT_EQ(TableDigest(), second);
  // A model that is there is found, and stays as it is.
  Declare(config, {.restore_from = "first"});
  EXPECT_FALSE(model_.created);
  EXPECT_EQ(TableDigest(), second);
  ASSERT_TRUE(*client_->DropModel("one"));
  Declare(config, {.restore_from = "first"});
  EXPECT_EQ(TableDigest(), first);
  ASSERT_TRUE(*client_->DropModel("one"));
  Declare(config);
  EXPECT_EQ(TableDigest(), initial);
  for (const absl::Status& nameless :
       {client_->DropModel("").status(), client_->ResetModel(""),
        client_->SaveCheckpoint("").status(), client_->DropGroup("", "g").status()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(nameless)) << nameless;
    EXPECT_THAT(std::string(nameless.message()), HasSubstr("name is empty"));
  }
  // One that is planned for other samples keeps its plan, and takes the rows all the same.
  ASSERT_TRUE(*client_->DropModel("one"));
  Declare(absl::StrReplaceAll(config, {{"batch_size: 20", "batch_size: 40"}}));
  const uint64_t id = model_.id;
  Restore("one", {.name = "first"});
  EXPECT_EQ(model_.id, id);
  EXPECT_EQ(TableDigest(), first);
}

}  // namespace checkpoint_use_test
}  // namespace emberd::testing
