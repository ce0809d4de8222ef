// What a trainer sees of the ways to store a table, through a real cluster. Prevents a setting that
// the engine honours and the servers on the way drop.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"

namespace emberd::testing {
namespace storage_test {

constexpr char kModel[] = R"(
  name: "stored"
  tables { name: "full" vocabulary_size: 40 embedding_dim: 8 combiner: SUM
           initializer { constant { value: 0.1 } } optimizer { sgd {} learning_rate: 1 } }
  tables { name: "half" vocabulary_size: 40 embedding_dim: 8 combiner: SUM storage_dtype: FLOAT16
           initializer { constant { value: 0.1 } } optimizer { sgd {} learning_rate: 1 } }
  tables { name: "skipping" vocabulary_size: 40 embedding_dim: 8 combiner: SUM
           on_nonfinite_gradient: SKIP_ROW
           initializer { constant { value: 1 } } optimizer { sgd {} learning_rate: 1 } }
  tables { name: "random" vocabulary_size: 40 embedding_dim: 8 combiner: SUM
           storage_dtype: BFLOAT16 update_rounding: STOCHASTIC
           initializer { constant { value: 1 } } optimizer { sgd {} learning_rate: 1 } }
  features { name: "f" table: "full" }
  features { name: "h" table: "half" }
  features { name: "s" table: "skipping" }
  features { name: "r" table: "random" }
)";

class StorageTest : public ClusterFixture {
 protected:
  void SetUp() override { StartCluster({}, kModel); }

  float Read(const std::string& table, int64_t id) {
    const std::vector<int64_t> ids = {id};
    auto rows = client_->ReadRows(model_, table, ids);
    EXPECT_TRUE(rows.ok()) << rows.status();
    return rows.ok() ? rows->values[7] : 0;
  }
  void Assign(const std::string& table, int64_t id, float value) {
    const std::vector<int64_t> ids = {id};
    auto done = client_->AssignRows(model_, table, ids, std::vector<float>(8, value));
    ASSERT_TRUE(done.ok()) << done.status();
  }
  // Looks ids up by all features.
  client::BatchHandle Lookup(const std::vector<int64_t>& ids) {
    std::vector<client::FeatureIds> features;
    for (const char* name : {"f", "h", "s", "r"}) features.push_back({name, client::DenseIds{ids}});
    auto found = client_->Lookup(model_, features);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->batch : client::BatchHandle();
  }
  // Applies the gradient, the same in every column, to row id of some tables.
  void Train(int64_t id, float gradient, const std::vector<std::string>& features = {"f", "h"}) {
    const std::vector<float> values(8, gradient);
    std::vector<client::FeatureGradient> gradients;
    for (const std::string& feature : features) gradients.push_back({feature, values, 1});
    auto applied = client_->ApplyGradients(model_, Lookup({id}), gradients);
    ASSERT_TRUE(applied.ok()) << applied.status();
  }
};

TEST_F(StorageTest, Float16RoundsToNearestEven) {
  EXPECT_EQ(Read("full", 3), 0.1f);
  EXPECT_EQ(Read("half", 3), 0x1.998p-4f);  // 11 significant bits of 0.1
  Assign("half", 3, 2049);                  // between 2048 and 2050
  EXPECT_EQ(Read("half", 3), 2048);
  Assign("half", 4, 1024);
  Train(4, -1.5f);  // 1025.5, between 1025 and 1026
  EXPECT_EQ(Read("half", 4), 1026);
}

TEST_F(StorageTest, Float16SaturatesAndTrainsOn) {
  Assign("half", 5, 1e30f);
  EXPECT_EQ(Read("half", 5), 65504);
  Train(6, -1e30f);
  EXPECT_EQ(Read("full", 6), 1e30f);
  EXPECT_EQ(Read("half", 6), 65504);
  Train(6, 2e5f);
  EXPECT_EQ(Read("half", 6), -65504);
  Train(6, -65504);
  EXPECT_EQ(Read("half", 6), 0);
}

TEST_F(StorageTest, StochasticRoundingFollowsSmallChanges) {
  // Steps of 1/32 of the distance between neighbours; 8 rows of 8 columns.
  double sum = 0;
  for (int64_t id = 0; id < 8; ++id) {
    for (int step = 0; step < 32; ++step) Train(id, -0x1p-12f, {"r", "h"});
    const std::vector<int64_t> ids = {id};
    const auto rows = client_->ReadRows(model_, "random", ids);
    ASSERT_TRUE(rows.ok()) << rows.status();
    for (const float x : rows->values) sum += x;
  }
  // The mean rises by one distance; its deviation is about 1/8 of that.
  EXPECT_NEAR(sum / 64, 1 + 0x1p-7, 5 * 0x1p-10);
}

TEST_F(StorageTest, RowsWithNonfiniteGradientsAreSkippedWhereTheTableSaysSo) {
  const client::BatchHandle batch = Lookup({7, 8});
  std::vector<float> values(16, 0.25f);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  auto refused = client_->ApplyGradients(model_, batch, {{{"f", values, 2}}});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();

  client::ApplyOptions options;
  options.sequence = client_->NextSequence();
  for (const bool replayed : {false, true}) {
    auto applied = client_->ApplyGradients(model_, batch, {{{"s", values, 2}}}, options);
    ASSERT_TRUE(applied.ok()) << applied.status();
    EXPECT_EQ(applied->replayed, replayed);
    EXPECT_EQ(applied->rows_updated, 7);
    EXPECT_EQ(applied->rows_skipped, 1);
    EXPECT_EQ(Read("skipping", 7), 1);
    EXPECT_EQ(Read("skipping", 8), 0.75f);
  }
}

}  // namespace storage_test
}  // namespace emberd::testing
