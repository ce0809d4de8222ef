// A checkpoint that was saved while trainers were at full speed has, on any number of shards, bit
// for bit the rows and slots that an undisturbed run has after the same step, of every optimizer
// and storage type; where the number of partitions is the same, so has what is trained after it. A
// failure here means that a restore forgot something that the rows depend on (a slot, the count
// behind stochastic rounding, the group's step), put rows in the wrong place, or let an initialiser
// run.
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "config/optimizers.h"
#include "gtest/gtest.h"
#include "shard/testing/optimizer_cases.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace checkpoint_restore_test {

constexpr char kModelName[] = "all";
constexpr int64_t kVocabulary = 300;
constexpr int64_t kSamples = 10;  // of a global batch, each with kIds ids
constexpr int64_t kIds = 3;
constexpr int64_t kColumns = 8;
constexpr int64_t kStepsAfter = 20;
constexpr int kRanks = 2;
constexpr int64_t kStepsToHear = 30;  // of a checkpoint that was asked for

// A table and a feature for every optimizer, and one more table in the first stack. The storage
// types go round; those of 16 bits round stochastically. `numbered`: with the optimizers that need
// the number of the step.
struct AllOptimizers {
  std::vector<std::string> tables;
  std::string config;
};
AllOptimizers MakeAllOptimizers(bool numbered) {
  AllOptimizers all;
  all.config = absl::StrCat("name: '", kModelName, "' seed: 7\n");
  const auto add = [&](const std::string& name, const std::string& optimizer, size_t storage) {
    const char* const kStorage[] = {"storage_dtype: FLOAT32",
                                    "storage_dtype: BFLOAT16 update_rounding: STOCHASTIC",
                                    "storage_dtype: FLOAT16 update_rounding: STOCHASTIC"};
    absl::StrAppend(
        &all.config,
        absl::Substitute("tables { name: '$0' vocabulary_size: $1 embedding_dim: $2 "
                         "combiner: SUM $3 optimizer { $4 learning_rate: 0.05 } }\n"
                         "features { name: '$0' table: '$0' batch_size: $5 }\n",
                         name, kVocabulary, kColumns, kStorage[storage % 3], optimizer, kSamples));
    all.tables.push_back(name);
  };
  size_t storage = 0;
  for (const auto& optimizer : shard::testing::OptimizerCases()) {
    const bool needs =
        config::OptimizerNeedsStep(shard::testing::CompleteOptimizer(optimizer.text));
    if (needs && !numbered) continue;
    if (storage == 0) add("Second", optimizer.text, storage);
    add(optimizer.name, optimizer.text, storage++);
  }
  return all;
}

// Skewed, so that some rows are updated often and some never.
std::vector<int64_t> IdsOf(int64_t step, size_t feature, int64_t begin, int64_t end) {
  std::mt19937_64 random(static_cast<uint64_t>(step) * 1000 + feature);
  std::vector<int64_t> ids(kSamples * kIds);
  for (int64_t& id : ids) {
    id = static_cast<int64_t>(random() % (1 + random() % static_cast<uint64_t>(kVocabulary)));
  }
  return {ids.begin() + begin * kIds, ids.begin() + end * kIds};
}

// One batch, or a rank's samples [begin, end) of it, with gradients that show one wrong bit of an
// activation in the tables.
class Batch {
 public:
  Batch(const std::vector<std::string>* tables, int64_t step, int64_t begin, int64_t end)
      : tables_(tables), step_(step), begin_(begin), samples_(end - begin) {
    for (size_t f = 0; f < tables->size(); ++f) ids_.push_back(IdsOf(step, f, begin, end));
  }
  std::vector<client::FeatureIds> Features() const {
    std::vector<client::FeatureIds> features;
    for (size_t f = 0; f < ids_.size(); ++f) {
      features.push_back({(*tables_)[f], client::DenseIds{absl::MakeConstSpan(ids_[f]), kIds}});
    }
    return features;
  }
  std::vector<client::FeatureGradient> Gradients(
      const std::vector<client::Activation>& activations) {
    std::vector<client::FeatureGradient> gradients;
    values_.resize(activations.size());
    for (size_t f = 0; f < activations.size(); ++f) {
      std::mt19937_64 random(static_cast<uint64_t>(step_) * 1000 + f + 500);
      random.discard(static_cast<uint64_t>(begin_ * kColumns));
      values_[f].clear();
      for (const float value : activations[f].values) {
        const double noise = static_cast<double>(random() >> 11) * 0x1p-53 - 0.5;
        values_[f].push_back(0.1f * value + static_cast<float>(noise));
      }
      gradients.push_back({(*tables_)[f], values_[f], samples_});
    }
    return gradients;
  }

 private:
  const std::vector<std::string>* const tables_;
  const int64_t step_;
  const int64_t begin_;
  const int64_t samples_;
  std::vector<std::vector<int64_t>> ids_;
  std::vector<std::vector<float>> values_;
};

// How steps are trained: [begin, end) of one trainer, whole batches.
using Train =
    std::function<absl::Status(client::Client&, const client::Model&, int64_t begin, int64_t end)>;

class CheckpointTest : public ::testing::Test {
 protected:
  std::string Storage() const {
    return absl::StrCat("storage { directory: \"", storage_.path(), "\" }");
  }
  ClusterOptions Embedded(int shards, int sparsecores) const {
    return {.shards = shards,
            .sparsecores_per_shard = sparsecores,
            .embedded = true,
            .config = Storage()};
  }
  void Start(const ClusterOptions& options) {
    client_.reset();
    cluster_.reset();
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
  }
  void Declare(const std::string& config, const client::DeclareOptions& options = {}) {
    auto model = client_->DeclareModel(config, options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  void Restore(const client::RestoreOptions& options) {
    auto restored = client_->RestoreCheckpoint(kModelName, options);
    ASSERT_TRUE(restored.ok()) << restored.status();
    auto model = client_->DescribeModel(kModelName);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  std::string TableDigest() {
    auto digest = Digest(*client_, model_);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }

  // By step: what an undisturbed run has then.
  std::map<int64_t, std::string> Undisturbed(const Train& train, const std::set<int64_t>& steps) {
    std::map<int64_t, std::string> digests;
    Start(Embedded(4, 2));
    Declare(all_.config);
    int64_t at = 0;
    for (const int64_t step : steps) {
      const absl::Status trained = train(*client_, model_, at, step);
      EXPECT_TRUE(trained.ok()) << trained;
      digests[step] = TableDigest();
      at = step;
    }
    return digests;
  }

  // On every layout, the checkpoint has the rows of the undisturbed run after `step`.
  void ExpectRestored(const std::string& name, int64_t step, const Train& train,
                      std::map<int64_t, std::string>& expected) {
    for (const auto& [shards, sparsecores] :
         {std::pair(2, 4), std::pair(8, 1), std::pair(1, 8), std::pair(4, 2), std::pair(8, 2)}) {
      SCOPED_TRACE(absl::StrCat(shards, " shards of ", sparsecores));
      Start(Embedded(shards, sparsecores));
      Restore({.name = name});
      EXPECT_EQ(TableDigest(), expected[step]);
      const absl::Status trained = train(*client_, model_, step, step + kStepsAfter);
      ASSERT_TRUE(trained.ok()) << trained;
      // Another number of partitions sums in another order.
      if (shards * sparsecores == 8) {
        EXPECT_EQ(TableDigest(), expected[step + kStepsAfter]);
      }
    }
  }

  TempDir storage_ = *TempDir::Create();
  AllOptimizers all_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
};

// What the ranks of a group under way tell the test, and each other.
struct GroupRun {
  std::atomic<int64_t> reached{0};  // by rank 0
  std::atomic<int64_t> end{std::numeric_limits<int64_t>::max()};
  // The last rank is to ask for a checkpoint "asked" with its next update: that of this step.
  std::atomic<bool> ask{false};
  std::atomic<int64_t> asked{-1};
  std::string outcome = "not known";
};

// Returns when the checkpoint is there; its coordinator may not have heard so yet.
void AwaitCheckpoint(client::Client& client, const std::string& name) {
  EXPECT_TRUE(Eventually([&] {
    const auto list = client.ListCheckpoints(kModelName);
    return list.ok() && std::any_of(list->checkpoints.begin(), list->checkpoints.end(),
                                    [&](const auto& info) { return info.name == name; });
  }));
}

absl::Status TrainRank(client::Client& client, const client::Model& model,
                       const std::vector<std::string>& tables, const client::TrainOptions& options,
                       GroupRun* run) {
  ASSIGN_OR_RETURN(const auto stream, client.Train(model, options));
  const int64_t begin_sample = kSamples * options.rank / options.size;
  const int64_t end_sample = kSamples * (options.rank + 1) / options.size;
  for (int64_t step = stream->next_step(); step < run->end; ++step) {
    Batch batch(&tables, step, begin_sample, end_sample);
    RETURN_IF_ERROR(stream->SendLookup(step, batch.Features()));
    ASSIGN_OR_RETURN(const auto found, stream->ReceiveLookup());
    client::UpdateOptions update;
    if (options.rank == options.size - 1 && run->ask && run->asked < 0) {
      update.checkpoint = "asked";
      run->asked = step;
      run->end = step + kStepsToHear;  // no rank is there yet
    }
    // As long as no result has told of it, one more step for all: none is beyond this one.
    const bool asked_before = run->asked >= 0 && run->asked < step;
    if (options.rank == options.size - 1 && asked_before && step + 1 == run->end) {
      AwaitCheckpoint(client, "asked");
      absl::SleepFor(absl::Milliseconds(100));  // so that there are not many
      if (run->outcome == "not known") ++run->end;
    }
    RETURN_IF_ERROR(stream->SendUpdate(step, batch.Gradients(found.activations), update));
    ASSIGN_OR_RETURN(const client::TrainUpdateResult updated, stream->ReceiveUpdate());
    if (!updated.checkpoint.empty()) {
      run->outcome = absl::StrCat(updated.checkpoint, ": ", updated.checkpoint_error);
    }
    if (options.rank == 0) run->reached = step + 1;
  }
  return stream->Finish();
}

// A SYNC group of one, which has to begin where it left off.
Train TrainAlone(const std::vector<std::string>& tables, client::Consistency consistency) {
  return [&tables, consistency](client::Client& client, const client::Model& model, int64_t begin,
                                int64_t end) -> absl::Status {
    const client::TrainOptions options{.group = "run", .consistency = consistency};
    {
      ASSIGN_OR_RETURN(const auto stream, client.Train(model, options));
      EXPECT_EQ(stream->next_step(), begin);
      RETURN_IF_ERROR(stream->Finish());
    }
    GroupRun run;
    run.end = end;
    return TrainRank(client, model, tables, options, &run);
  };
}

// Unary calls whose updates have no number of a step.
Train TrainUnary(const std::vector<std::string>& tables) {
  return [&tables](client::Client& client, const client::Model& model, int64_t begin,
                   int64_t end) -> absl::Status {
    for (int64_t step = begin; step < end; ++step) {
      Batch batch(&tables, step, 0, kSamples);
      ASSIGN_OR_RETURN(const auto found, client.Lookup(model, batch.Features()));
      RETURN_IF_ERROR(
          client.ApplyGradients(model, found.batch, batch.Gradients(found.activations)).status());
    }
    return absl::OkStatus();
  };
}

TEST_F(CheckpointTest, OfASyncGroupIsItsStepOnEveryLayout) {
  all_ = MakeAllOptimizers(/*numbered=*/true);
  Start({.shards = 4, .sparsecores_per_shard = 2, .coordinators = 2, .config = Storage()});
  Declare(all_.config);
  GroupRun run;
  std::vector<absl::Status> trained(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      client::ClientOptions options = cluster_->client_options();
      options.addresses = {cluster_->address(rank)};
      auto client = client::Client::Connect(options);
      trained[rank] = !client.ok()
                          ? client.status()
                          : TrainRank(**client, model_, all_.tables,
                                      {.group = "run", .rank = rank, .size = kRanks}, &run);
    });
  }
  const auto save = [&](int64_t after, const client::SaveOptions& options) {
    Eventually([&] { return run.reached >= after; });
    return client_->SaveCheckpoint(kModelName, options);
  };
  const auto whole = save(20, {});
  const auto changed = save(35, {.name = "changed", .incremental = true});
  run.ask = true;
  for (std::thread& rank : ranks) rank.join();
  for (const absl::Status& status : trained) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_TRUE(changed.ok()) << changed.status();
  ASSERT_EQ(whole->checkpoint.groups.size(), 1u);
  const int64_t first = whole->checkpoint.groups[0].next_step;
  const int64_t second = changed->checkpoint.groups[0].next_step;
  EXPECT_EQ(whole->checkpoint.name, absl::StrCat("step-", first));
  EXPECT_EQ(changed->checkpoint.parent, whole->checkpoint.name);
  EXPECT_GE(first, 20);
  EXPECT_GT(second, first);
  EXPECT_EQ(run.outcome, "asked: ");
  const int64_t third = run.asked + 1;
  const std::string end = TableDigest();

  const Train train = TrainAlone(all_.tables, client::Consistency::kSync);
  std::set<int64_t> steps = {run.end};
  for (const int64_t step : {first, second, third}) {
    steps.insert({step, step + kStepsAfter});
  }
  auto expected = Undisturbed(train, steps);
  EXPECT_EQ(end, expected[run.end]) << "saving has changed what is trained";
  ExpectRestored(whole->checkpoint.name, first, train, expected);
  ExpectRestored("changed", second, train, expected);
  ExpectRestored("asked", third, train, expected);
}

// BOUNDED: updates are numbered, but each rank's are on their own.
TEST_F(CheckpointTest, OfABoundedGroupGoesOnFromItsStep) {
  all_ = MakeAllOptimizers(/*numbered=*/true);
  const Train train = TrainAlone(all_.tables, client::Consistency::kBounded);
  auto expected = Undisturbed(train, {15, 15 + kStepsAfter});
  Start(Embedded(4, 2));
  Declare(all_.config);
  ASSERT_TRUE(train(*client_, model_, 0, 15).ok());
  ASSERT_TRUE(client_->SaveCheckpoint(kModelName, {.name = "c"}).ok());
  ExpectRestored("c", 15, train, expected);
}

TEST_F(CheckpointTest, OfUnaryUpdatesKeepsTheirCount) {
  all_ = MakeAllOptimizers(/*numbered=*/false);
  Start({.shards = 4, .sparsecores_per_shard = 2, .coordinators = 2, .config = Storage()});
  Declare(all_.config);
  const Train train = TrainUnary(all_.tables);
  std::atomic<bool> done{false}, failed{false};
  std::atomic<int64_t> made{0};
  absl::Status trained;
  std::thread trainer([&] {
    for (int64_t step = 0; !done && trained.ok(); ++step) {
      trained = train(*client_, model_, step, step + 1);
      made = step + 1;
    }
    failed = !trained.ok();
  });
  EXPECT_TRUE(Eventually([&] { return made > 10 || failed; }));
  auto saving = cluster_->Connect();
  const auto saved = saving->SaveCheckpoint(kModelName, {.name = "c"});
  done = true;
  trainer.join();
  ASSERT_TRUE(trained.ok()) << trained;
  ASSERT_TRUE(saved.ok()) << saved.status();
  const int64_t step = saved->checkpoint.changes;
  EXPECT_GT(step, 3);
  auto expected = Undisturbed(train, {step, step + kStepsAfter});
  ExpectRestored("c", step, train, expected);
}

}  // namespace checkpoint_restore_test
}  // namespace emberd::testing
