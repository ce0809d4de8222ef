// What a trainer sees of the ways to store a table, through a real cluster. Prevents a setting that
// the engine honours and the servers on the way drop.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {
namespace {

constexpr char kModel[] = R"(
  name: "stored"
  tables { name: "full" vocabulary_size: 40 embedding_dim: 8 combiner: SUM
           initializer { constant { value: 0.1 } } optimizer { sgd {} learning_rate: 1 } }
  tables { name: "half" vocabulary_size: 40 embedding_dim: 8 combiner: SUM storage_dtype: FLOAT16
           initializer { constant { value: 0.1 } } optimizer { sgd {} learning_rate: 1 } }
  features { name: "f" table: "full" }
  features { name: "h" table: "half" }
)";

class StorageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cluster = Cluster::Start({});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
    auto model = client_->DeclareModel(kModel);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

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
  // Looks id up by both features and applies the gradient, the same in every column.
  void Train(int64_t id, float gradient) {
    const std::vector<int64_t> ids = {id};
    const std::vector<client::FeatureIds> features = {{"f", client::DenseIds{ids}},
                                                      {"h", client::DenseIds{ids}}};
    auto found = client_->Lookup(model_, features);
    ASSERT_TRUE(found.ok()) << found.status();
    const std::vector<float> values(8, gradient);
    auto applied =
        client_->ApplyGradients(model_, found->batch, {{{"f", values, 1}, {"h", values, 1}}});
    ASSERT_TRUE(applied.ok()) << applied.status();
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
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

}  // namespace
}  // namespace emberd::testing
