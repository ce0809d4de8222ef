// Models that share a table, on a cluster of two shards.
#pragma once

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/file_faults.h"
#include "tests/testing/training.h"

namespace emberd::testing {

constexpr int64_t kRows = 300;
constexpr int kDim = 8;
constexpr int64_t kSamples = 48;

// Table "users" has the resource; "own" is the model's.
inline std::string SharingModel(const std::string& name, const std::string& users = "",
                                const std::string& rest = "") {
  return absl::StrCat(
      "name: '", name, "' seed: 5 enable_variable_deduplication: true ", rest,
      " tables { name: 'own' vocabulary_size: 100 embedding_dim: 8 }"
      " tables { name: 'users' vocabulary_size: ",
      kRows, " embedding_dim: ", kDim,
      " combiner: SUM resource { container: 'ctr' name: 'users' } ", users,
      " }"
      " features { name: 'own' table: 'own' } features { name: 'user' table: 'users' }");
}

// As the others, but with all tables for itself.
inline std::string LonelyModel(const std::string& name) {
  std::string model = SharingModel(name);
  const std::string resource = " resource { container: 'ctr' name: 'users' } ";
  return model.erase(model.find(resource), resource.size());
}

// As SharingModel, but the shared table has another name, and two of them.
inline std::string OtherNames(const std::string& name) {
  const std::string table = absl::StrCat(" vocabulary_size: ", kRows, " embedding_dim: ", kDim,
                                         " resource { container: 'ctr' name: 'users' } combiner: ");
  return absl::StrCat("name: '", name, "' seed: 5 enable_variable_deduplication: true",
                      " tables { name: 'own' vocabulary_size: 100 embedding_dim: 8 }"
                      " tables { name: 'readers'",
                      table, "SUM } tables { name: 'writers'", table, "MEAN }",
                      " features { name: 'own' table: 'own' }"
                      " features { name: 'user' table: 'readers' }"
                      " features { name: 'writer' table: 'writers' }");
}

// `sequence`: of an update that may be there; 0: a new one.
inline absl::StatusOr<client::ApplyResult> Train(client::Client& client, const client::Model& model,
                                                 uint64_t seed, uint64_t sequence = 0) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> users(2 * kSamples), own(kSamples);
  for (int64_t& id : users) id = static_cast<int64_t>(random() % kRows);
  for (int64_t& id : own) id = static_cast<int64_t>(random() % 100);
  std::vector<client::FeatureIds> features = {{"user", client::DenseIds{users, 2}},
                                              {"own", client::DenseIds{own, 1}}};
  if (model.FindFeature("writer") != nullptr) {
    features.push_back({"writer", client::DenseIds{own, 1}});
  }
  auto found = client.Lookup(model, features);
  if (!found.ok()) return found.status();
  // What was looked up goes in, so that a difference of one bit stays.
  std::vector<std::vector<float>> values;
  std::vector<client::FeatureGradient> gradients;
  for (const client::Activation& activation : found->activations) {
    std::vector<float>& of =
        values.emplace_back(activation.values.begin(), activation.values.end());
    for (float& g : of) g = g / 2 + static_cast<float>(random() % 256) / 256;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    gradients.push_back({found->activations[i].feature, values[i], kSamples});
  }
  client::ApplyOptions options;
  options.sequence = sequence;
  return client.ApplyGradients(model, found->batch, gradients, options);
}

inline absl::StatusOr<std::vector<float>> Table(client::Client& client, const client::Model& model,
                                                const std::string& table,
                                                const std::string& slot = "") {
  std::vector<float> all;
  client::ExportOptions options;
  options.slot = slot;
  const absl::Status status = client.ExportTable(
      model, table,
      [&](int64_t, absl::Span<const float> values, int64_t) {
        all.insert(all.end(), values.begin(), values.end());
        return absl::OkStatus();
      },
      options);
  if (!status.ok()) return status;
  return all;
}

// Weights and slots of what a model has.
struct Rows {
  std::vector<float> users, accumulators, own;
  bool operator==(const Rows&) const = default;
};

class SharedTablesTest : public ::testing::Test {
 protected:
  void Start(const std::string& config = "", const std::string& durability = "",
             ClusterOptions options = {}) {
    const std::string storage = durability.empty()
                                    ? ""
                                    : absl::StrCat("storage { directory: '", storage_.path(),
                                                   "' durability: ", durability, " }");
    options.shards = 2;
    options.config = absl::StrCat(config, " ", storage);
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
  }

  void StartWithFaultyDisk() {
    Start("", "LOG fsync: ALWAYS", {.file_faults = faults_.environment()});
  }

  client::Model Declare(const std::string& name) {
    auto model = client_->DeclareModel(SharingModel(name));
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  }
  void Step(const client::Model& model, uint64_t seed) {
    const absl::Status status = Await([&] { return Train(*client_, model, seed); }).status();
    ASSERT_TRUE(status.ok()) << status;
  }
  Rows Read(const client::Model& model) {
    const auto table = [&](const std::string& name, const std::string& slot) {
      auto rows = Await([&] { return Table(*client_, model, name, slot); });
      EXPECT_TRUE(rows.ok()) << rows.status();
      return rows.value_or(std::vector<float>());
    };
    return {table("users", ""), table("users", "accumulator"), table("own", "")};
  }
  int64_t TableBytes() {
    const client::ClusterStatus status = AwaitAllShards(*client_);
    int64_t bytes = 0;
    for (const client::ShardStatus& shard : status.shards) bytes += shard.table_bytes;
    return bytes;
  }
  void Drop(const std::string& name) {
    auto dropped = client_->DropModel(name);
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(*dropped);
  }
  void LoseShards() {
    for (const int shard : {0, 1}) cluster_->KillShard(shard);
    for (const int shard : {0, 1}) ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  void Save(const std::string& model, const std::string& name) {
    const auto saved = Await([&] { return client_->SaveCheckpoint(model, {.name = name}); });
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  std::vector<std::string> Checkpoints(const std::string& model) {
    std::vector<std::string> names;
    const auto list = client_->ListCheckpoints(model);
    EXPECT_TRUE(list.ok()) << list.status();
    for (const client::CheckpointInfo& info : list->checkpoints) names.push_back(info.name);
    return names;
  }
  // Of the log of a shard.
  uint64_t OldestSegment(int shard) const {
    uint64_t oldest = std::numeric_limits<uint64_t>::max();
    const std::string folder = storage_.Path(absl::StrCat("shard-000", shard, "/log"));
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      uint64_t segment = 0;
      if (file.path().extension() != ".records") continue;
      EXPECT_TRUE(absl::SimpleAtoi(file.path().stem().string(), &segment)) << file.path();
      oldest = std::min(oldest, segment);
    }
    return oldest;
  }
  // Saves the model, after which neither log has what came before.
  void ExpectCut(const std::string& model, const std::string& name) {
    const uint64_t before[2] = {OldestSegment(0), OldestSegment(1)};
    ASSERT_NO_FATAL_FAILURE(Save(model, name));
    for (const int shard : {0, 1}) EXPECT_GT(OldestSegment(shard), before[shard]) << shard;
  }
  absl::Status DeclareOther(const std::string& users, const std::string& rest = "") {
    return client_->DeclareModel(SharingModel("other", users, rest)).status();
  }

  const TempDir storage_ = *TempDir::Create(), control_ = *TempDir::Create();
  FileFaults faults_{control_.Path("faults"), storage_.path()};
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace emberd::testing
