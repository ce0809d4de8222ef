#include "client/cpp/model_codec.h"

#include <limits>

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace model_codec_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

ModelDescription OneTable(Optimizer optimizer) {
  ModelDescription model;
  model.name = "m";
  model.tables.push_back({.name = "t", .vocabulary_size = 10, .embedding_dim = 4});
  model.features.push_back({.name = "f", .table = "t"});
  model.optimizer = std::move(optimizer);
  return model;
}

TEST(EncodeModelTest, WritesEveryField) {
  ModelDescription model = OneTable({"sgd", {{"learning_rate", 0.5f}}});
  model.seed = 7;
  model.tables[0].combiner = Combiner::kSqrtn;
  model.tables[0].initializer = Initializer::Uniform(-1, 1);
  model.tables[0].max_ids_per_partition = 3;
  model.tables[0].max_unique_ids_per_partition = 2;
  model.tables[0].optimizer = Optimizer{
      "adam", {{"beta1", 0.75}, {"beta2", 0.99}, {"bias_correction", 1}, {"clip_weight_max", 2}}};
  model.features[0].batch_size = 64;
  absl::StatusOr<v1::ModelConfig> config = EncodeModel(model);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto expected = Parse<v1::ModelConfig>(R"(
    name: "m" seed: 7 optimizer { learning_rate: 0.5 sgd {} }
    tables {
      name: "t" vocabulary_size: 10 embedding_dim: 4 combiner: SQRTN
      initializer { uniform { lower: -1 upper: 1 } }
      optimizer { clip_weight_max: 2 adam { beta1: 0.75 beta2: 0.99 bias_correction: true } }
      max_ids_per_partition: 3 max_unique_ids_per_partition: 2
    }
    features { name: "f" table: "t" batch_size: 64 })");
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*config, expected))
      << config->DebugString();
}

TEST(EncodeModelTest, Initializers) {
  const struct {
    Initializer initializer;
    const char* text;
  } cases[] = {
      {Initializer::Zeros(), "zeros {}"},
      {Initializer::Constant(3), "constant { value: 3 }"},
      {Initializer::Normal(1, 2), "normal { mean: 1 stddev: 2 }"},
      {Initializer::TruncatedNormal(1, 2), "truncated_normal { mean: 1 stddev: 2 }"},
      {Initializer::RowId(), "row_id {}"},
  };
  for (const auto& [initializer, text] : cases) {
    ModelDescription model = OneTable({});
    model.tables[0].initializer = initializer;
    absl::StatusOr<v1::ModelConfig> config = EncodeModel(model);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(
        config->tables(0).initializer(), Parse<v1::InitializerConfig>(text)))
        << text;
  }
  EXPECT_FALSE(EncodeModel(OneTable({}))->tables(0).has_initializer());
}

TEST(EncodeModelTest, RefusesWhatNoOptimizerHas) {
  const struct {
    Optimizer optimizer;
    const char* message;
  } cases[] = {
      {{"adagrat", {}}, "optimizer: there is no optimizer \"adagrat\"; there are: sgd, adagrad"},
      {{"learning_rate", {}}, "optimizer: there is no optimizer \"learning_rate\""},
      {{"sgd", {{"beta1", 0.5f}}}, "optimizer.beta1: sgd has no such parameter; it has: learning_"},
      {{"sgd", {{"adam", 1}}}, "optimizer.adam: sgd has no such parameter"},
      {{"custom", {{"expression", 1}}}, "optimizer.expression: custom has no such parameter"},
      {{"custom", {{"stablehlo", 0}}}, "optimizer.stablehlo: custom has no such parameter"},
      {{"momentum", {{"use_nesterov", 0.5f}}}, "optimizer.use_nesterov: 0.5 is not allowed"},
      {{"sgd", {{"learning_rate", 1e300}}}, "optimizer.learning_rate: 1e+300 is not allowed; it "},
      {{"adam", {{"epsilon", -1e300}}}, "optimizer.epsilon: -1e+300 is not allowed; it must be a"},
  };
  for (const auto& [optimizer, message] : cases) {
    const absl::Status status = EncodeModel(OneTable(optimizer)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

// FLT_MAX in eight digits, which is a little more than FLT_MAX.
TEST(EncodeModelTest, RoundsValuesAsAConfigDoes) {
  const auto config = EncodeModel(OneTable({"sgd", {{"clip_weight_max", 3.4028235e38}}}));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->optimizer().clip_weight_max(), std::numeric_limits<float>::max());
}

constexpr char kConfig[] = R"(
    name: "m"
    tables { name: "a" vocabulary_size: 10 embedding_dim: 4 }
    tables { name: "b" vocabulary_size: 20 embedding_dim: 3 }
    features { name: "y" table: "b" }
    features { name: "x" table: "a" })";
constexpr char kPlan[] = R"(
    shards: 2 sparsecores_per_shard: 4 table_bytes: 99
    stacks { name: "ab" embedding_dim: 8 rows_per_partition: 16 bytes_per_partition: 12
             tables { name: "b" } tables { name: "a" row_offset: 8 shard_rotation: 3 } optimizer: "adagrad" slots: "accumulator" })";

TEST(DecodeModelTest, KeepsTheOrderOfTheConfig) {
  auto config = Parse<v1::ModelConfig>(kConfig);
  config.mutable_tables(1)->mutable_quantization()->set_lower(-2);
  config.mutable_tables(1)->mutable_quantization()->set_num_buckets(16777217);
  absl::StatusOr<Model> model = DecodeModel(5, true, config, Parse<v1::ModelPlan>(kPlan));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(model->tables[0].quantization, ElementsAre());
  EXPECT_THAT(model->tables[1].quantization, ElementsAre(-2, 0, 16777217));
  EXPECT_EQ(model->id, 5u);
  EXPECT_TRUE(model->created);
  EXPECT_EQ(model->shards, 2);
  EXPECT_EQ(model->sparsecores_per_shard, 4);
  EXPECT_EQ(model->table_bytes, 99);
  ASSERT_EQ(model->tables.size(), 2u);
  EXPECT_EQ(model->tables[1].name, "b");
  EXPECT_EQ(model->tables[1].vocabulary_size, 20);
  EXPECT_EQ(model->tables[1].stack, "ab");
  EXPECT_THAT(model->tables[1].slots, ElementsAre("accumulator"));
  EXPECT_EQ(model->tables[0].row_offset, 8);
  EXPECT_EQ(model->tables[0].shard_rotation, 3);
  ASSERT_EQ(model->features.size(), 2u);
  EXPECT_EQ(model->features[0].name, "y");
  EXPECT_EQ(model->features[0].embedding_dim, 3);
  EXPECT_THAT(model->stacks[0].tables, ElementsAre("b", "a"));
  EXPECT_EQ(model->FindFeature("x"), &model->features[1]);
  EXPECT_EQ(model->FindTable("none"), nullptr);
}

TEST(DecodeModelTest, DoesNotBelieveWhatCannotBe) {
  const v1::ModelConfig config = Parse<v1::ModelConfig>(kConfig);
  const v1::ModelPlan plan = Parse<v1::ModelPlan>(kPlan);
  EXPECT_EQ(DecodeModel(0, true, config, plan).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(DecodeModel(1, true, config, {}).status().code(), absl::StatusCode::kInternal);
  v1::ModelConfig dangling = config;
  dangling.mutable_features(0)->set_table("none");
  EXPECT_EQ(DecodeModel(1, true, dangling, plan).status().code(), absl::StatusCode::kInternal);
  v1::ModelConfig flat = config;
  flat.mutable_tables(0)->set_embedding_dim(0);
  EXPECT_EQ(DecodeModel(1, true, flat, plan).status().code(), absl::StatusCode::kInternal);
}

}  // namespace model_codec_test
}  // namespace emberd::client
