// The sample configs are what users copy from: each must load, and say what its comments say.
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "base/testing/paths.h"
#include "config/config.h"

namespace emberd::config {
namespace samples_test {

const std::string kSamples = SourcePath("config/samples/");

v1::ModelConfig Model(const std::string& file) {
  const auto model = LoadModel(kSamples + file);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : v1::ModelConfig();
}
v1::ClusterConfig Cluster(const std::string& file) {
  const auto cluster = LoadCluster(kSamples + file);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  return cluster.ok() ? *cluster : v1::ClusterConfig();
}

TEST(Samples, EveryFileLoads) {
  int models = 0, clusters = 0;
  for (const auto& file : std::filesystem::directory_iterator(kSamples)) {
    const std::string name = file.path().filename();
    if (name.rfind("batch_", 0) == 0) continue;  // for `emberctl explain`
    const bool is_model = name.rfind("model_", 0) == 0;
    const absl::Status status =
        is_model ? LoadModel(file.path()).status() : LoadCluster(file.path()).status();
    EXPECT_TRUE(status.ok()) << status;
    ++(is_model ? models : clusters);
  }
  EXPECT_GE(models, 3);
  EXPECT_GE(clusters, 3);
}

TEST(Samples, SmallModel) {
  const v1::ModelConfig model = Model("model_small.textproto");
  ASSERT_EQ(model.tables_size(), 3);
  EXPECT_EQ(model.features_size(), 4);
  EXPECT_TRUE(model.tables(2).optimizer().has_adam());
  EXPECT_EQ(model.tables(2).storage_dtype(), v1::BFLOAT16);
  EXPECT_EQ(model.tables(0).optimizer().clip_gradient_max(), 1);
  EXPECT_EQ(model.plan().groups(0).tables_size(), 2);
}

TEST(Samples, CriteoLikeModel) {
  const v1::ModelConfig model = Model("model_criteo_like.json");
  ASSERT_EQ(model.tables_size(), 26);
  EXPECT_EQ(model.features_size(), 26);
  int64_t largest = 0;
  for (const v1::TableConfig& table : model.tables()) {
    EXPECT_EQ(table.embedding_dim(), 16);
    EXPECT_TRUE(table.optimizer().has_adagrad());
    largest = std::max(largest, table.vocabulary_size());
  }
  EXPECT_EQ(largest, 1000000);
}

TEST(Samples, MovieLensModel) {
  const v1::ModelConfig model = Model("model_movielens.textproto");
  ASSERT_EQ(model.tables_size(), 7);
  EXPECT_EQ(model.tables(5).combiner(), v1::MEAN);
  EXPECT_EQ(model.tables(6).combiner(), v1::SQRTN);
}

TEST(Samples, LocalCluster) {
  const v1::ClusterConfig cluster = Cluster("cluster_local.textproto");
  EXPECT_EQ(cluster.shards_size(), 4);
  EXPECT_EQ(cluster.sparsecores_per_shard(), 2);
  EXPECT_EQ(cluster.coordinators_size(), 1);
}

TEST(Samples, SingleCluster) {
  const v1::ClusterConfig cluster = Cluster("cluster_single.json");
  EXPECT_EQ(cluster.shards_size(), 1);
  EXPECT_EQ(cluster.sparsecores_per_shard(), 4);
  EXPECT_EQ(cluster.logging().format(), v1::LoggingConfig::JSON);
}

TEST(Samples, ClusterWithCheckpoints) {
  const v1::ClusterConfig cluster = Cluster("cluster_checkpoints.textproto");
  EXPECT_EQ(cluster.shards_size(), 2);
  EXPECT_EQ(cluster.coordinators_size(), 2);
  EXPECT_EQ(cluster.storage().durability(), v1::StorageConfig::CHECKPOINT);
  EXPECT_EQ(cluster.storage().checkpoints(), "/var/lib/emberd/checkpoints");
  EXPECT_EQ(cluster.storage().every_seconds(), 300);
  EXPECT_EQ(cluster.storage().every_steps(), 10000);
  EXPECT_EQ(cluster.storage().keep(), 5);
}

}  // namespace samples_test
}  // namespace emberd::config
