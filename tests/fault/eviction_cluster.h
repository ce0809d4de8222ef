// For tests of clusters whose models may be evicted: models that are trained in turns, here and on
// a cluster that keeps them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {

inline std::string EvictedName(int model) { return absl::StrCat("mixed-", model); }

inline v1::GetStatusResponse StatusOf(const Cluster& cluster) {
  const Api api(cluster.address());
  v1::GetStatusResponse response;
  const grpc::Status status = Call(&v1::AdminService::Stub::GetStatus, api, {}, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

// A shard that does not answer the coordinator within a second, as on a busy machine, shows
// nothing.
inline v1::ShardStatus ShardStatusOf(const Cluster& cluster, int shard) {
  return Await([&] { return StatusOf(cluster).shards(shard); },
               [](const v1::ShardStatus& seen) { return seen.reachable(); });
}

// What emberctl prints.
struct Shown {
  int code;
  std::string text;
};
Shown Emberctl(const Cluster& cluster, std::vector<std::string> arguments);

// A cluster and the models declared there.
struct Trained {
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<client::Client> client;
  std::vector<client::Model> models;

  explicit Trained(const ClusterOptions& options) {
    auto started = Cluster::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    if (!started.ok()) return;
    cluster = *std::move(started);
    client = cluster->Connect();
  }
  // Those that fit.
  absl::Status Declare(int count) {
    for (int i = static_cast<int>(models.size()); i < count; ++i) {
      auto model = client->DeclareModel(MixedModel(EvictedName(i)));
      if (!model.ok()) return model.status();
      models.push_back(*std::move(model));
    }
    return absl::OkStatus();
  }
  absl::Status Step(int model, int step) {
    return TrainStep(*client, models[model], step * 3 + model, /*samples=*/32);
  }
  // Until shards are back.
  absl::Status StepAtLast(int model, int step) {
    return Await([&] { return Step(model, step); });
  }
  std::string Tables(int model) {
    const auto digest = Digest(*client, models[model]);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }
};

class EvictionCluster : public ::testing::Test {
 protected:
  static constexpr int kModels = 3;
  static constexpr int kShards = 2;

  // Starts what has no limit, and learns from it what a model takes.
  void SetUp() override {
    calm_ = std::make_unique<Trained>(
        ClusterOptions{.shards = 1, .sparsecores_per_shard = 2 * kShards, .embedded = true});
    ASSERT_TRUE(calm_->Declare(1).ok());
    bytes_ = ShardStatusOf(*calm_->cluster, 0).partitions(0).table_bytes();
    ASSERT_GT(bytes_, 0);
    ASSERT_TRUE(calm_->Declare(kModels).ok());
  }
  // Memory for so many of the models, and for the batches between their lookups and updates.
  int64_t BytesFor(int models) const { return models * bytes_ + kept_for_batches_; }
  // With memory for so many of the models.
  Trained StartFor(int models, const std::string& eviction = "",
                   const std::string& more = "") const {
    return Trained({.shards = kShards,
                    .config = absl::StrCat("budgets { bytes_per_sparsecore: ", BytesFor(models),
                                           " } eviction { spill_folder: \"", folder_.path(),
                                           "/spill\" ", eviction, " } ", more)});
  }
  // The same step of these models, here and where nothing is evicted.
  void TrainBoth(Trained& cluster, int step, const std::vector<int>& models) {
    for (const int model : models) {
      ASSERT_TRUE(calm_->Step(model, step).ok());
      const absl::Status status = cluster.StepAtLast(model, step);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void ExpectRightTables(Trained& cluster, const std::vector<int>& models) {
    for (const int model : models) EXPECT_EQ(cluster.Tables(model), calm_->Tables(model)) << model;
  }
  std::string Log() const {
    return absl::StrCat("storage { directory: \"", folder_.path(), "/data\" durability: LOG }");
  }

  const TempDir folder_ = *TempDir::Create();
  std::unique_ptr<Trained> calm_;
  int64_t bytes_ = 0;  // of a model in one partition
  int64_t kept_for_batches_ = 48 << 10;
};

}  // namespace emberd::testing
