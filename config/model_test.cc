// CompleteModel: defaults. (bad_model_test.cc has what it refuses.)
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/config.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace model_test {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

constexpr char kTwoTables[] = R"pb(
  name: "m"
  tables { name: "a" vocabulary_size: 100 embedding_dim: 64 }
  tables { name: "b" vocabulary_size: 50 embedding_dim: 4 }
  features { name: "fa" table: "a" }
  features { name: "fb" table: "b" }
)pb";

v1::ModelConfig Complete(const std::string& text) {
  const auto model = ParseModel(text);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : v1::ModelConfig();
}

v1::OptimizerConfig CompleteOptimizerOf(const std::string& optimizer) {
  return Complete(std::string(kTwoTables) + "optimizer {" + optimizer + "}").optimizer();
}

TEST(CompleteModel, WritesTheDefaultsOfTheProtoFile) {
  const v1::ModelConfig model = Complete(kTwoTables);
  const v1::TableConfig& table = model.tables(0);
  EXPECT_EQ(table.combiner(), v1::MEAN);
  EXPECT_EQ(table.storage_dtype(), v1::FLOAT32);
  EXPECT_EQ(table.update_rounding(), v1::NEAREST);
  EXPECT_EQ(table.on_nonfinite_gradient(), v1::REJECT);
  EXPECT_EQ(table.result_mode(), v1::AUTO);
  EXPECT_EQ(table.initializer().truncated_normal().mean(), 0);
  EXPECT_EQ(table.initializer().truncated_normal().stddev(), 0.125f);
  EXPECT_EQ(model.tables(1).initializer().truncated_normal().stddev(), 0.5f);
  EXPECT_EQ(table.optimizer().learning_rate(), 0.01f);
  EXPECT_EQ(table.optimizer().adagrad().initial_accumulator(), 0.1f);
  EXPECT_EQ(table.max_ids_per_partition(), 0);
  EXPECT_EQ(model.features(0).batch_size(), 1);
  EXPECT_EQ(model.plan().rules(), v1::JAX);
  EXPECT_EQ(model.plan().sample_layout(), v1::SPLIT_THEN_STACK);
  EXPECT_EQ(model.plan().bucket_hash(), v1::HIGHWAY_HASH);
  EXPECT_TRUE(model.plan().auto_stack());
  EXPECT_TRUE(model.plan().short_stack_names());
  EXPECT_EQ(model.plan().activation_bytes_limit(), 2 << 20);
  EXPECT_EQ(model.plan().shard_bytes_limit(), int64_t{2} << 30);
}

TEST(CompleteModel, TheBatchIsThatOfTheOutputShape) {
  v1::ModelConfig model = Complete(R"pb(
    name: "m"
    tables { name: "t" vocabulary_size: 8 embedding_dim: 4 }
    features {
      name: "user/history/item"
      table: "t"
      output_shape: [ 64, 16 ]
    }
  )pb");
  EXPECT_EQ(model.features(0).batch_size(), 1024);
  const v1::ModelConfig complete = model;
  ASSERT_TRUE(CompleteModel(&model).ok());
  EXPECT_TRUE(MessageDifferencer::Equals(model, complete));
}

TEST(SamplesOfTest, ReadsIdsByTheShapeOfTheActivation) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  using Shape = std::vector<int64_t>;
  const struct {
    Shape ids, output_shape;
    int64_t samples, ids_per_sample;
  } read[] = {{{5}, {}, 5, 1},
              {{5, 2}, {}, 5, 2},
              {{5, 0}, {7}, 5, 0},
              {{5, 1}, {1}, 5, 1},
              {{6}, {4, 3}, 6, 1},
              {{7}, {4, 3}, 7, 1},  // CheckSamples refuses it
              {{2, 3}, {4, 3}, 6, 1},
              {{0, 3}, {4, 3}, 0, 1},
              {{4, 3, 3}, {4, 3}, 12, 3},
              {{5, 3, 2}, {4, 3, 2}, 30, 1},
              {{5, 3, 2, 0}, {4, 3, 2}, 30, 0},
              {{int64_t{1} << 62, 3}, {4, 3}, kMost, 1}};
  for (const auto& [ids, output_shape, samples, ids_per_sample] : read) {
    const auto found = SamplesOf(ids, output_shape);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->samples, samples) << ids.size();
    EXPECT_EQ(found->ids_per_sample, ids_per_sample) << ids.size();
  }
  const struct {
    Shape ids, output_shape;
    const char* message;
  } refused[] = {
      {{}, {}, "shape is []; it must be [samples] or [samples, ids_per_sample]"},
      {{1, 2, 3}, {5}, "shape is [1, 2, 3]; it must be [samples] or [samples, ids_per_sample]"},
      {{},
       {4, 3},
       "shape is []; it must be [samples], [any, 3] or [any, 3, ids_per_sample], because "
       "output_shape is [4, 3]"},
      {{3, 4}, {4, 3}, "shape is [3, 4]; "},
      {{6, 1}, {4, 3}, "shape is [6, 1]; "},
      {{4, 3, 1, 1}, {4, 3}, "shape is [4, 3, 1, 1]; "},
      {{12, 2},
       {4, 3, 2},
       "shape is [12, 2]; it must be [samples], [any, 3, 2] or [any, 3, 2, "
       "ids_per_sample], because output_shape is [4, 3, 2]"},
      {{4, 2, 3}, {4, 3, 2}, "shape is [4, 2, 3]; "},
      {{4, 3, 3, 2}, {4, 3, 2}, "shape is [4, 3, 3, 2]; "}};
  for (const auto& [ids, output_shape, message] : refused) {
    const absl::Status status = SamplesOf(ids, output_shape).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StartsWith(status.message(), message)) << status;
  }
}

TEST(CompleteModel, FillsInThePlanOfTheRules) {
  const std::string rules = absl::StrCat(kTwoTables, "plan { rules: TENSORFLOW ");
  const v1::PlanConfig plan = Complete(rules + "}").plan();
  EXPECT_EQ(plan.sample_layout(), v1::STACK_THEN_SPLIT);
  EXPECT_EQ(plan.bucket_hash(), v1::ID_RANGE);
  EXPECT_FALSE(plan.short_stack_names());
  const v1::PlanConfig mixed = Complete(rules +
                                        "sample_layout: SPLIT_THEN_STACK bucket_hash: ID_MODULO "
                                        "short_stack_names: true }")
                                   .plan();
  EXPECT_EQ(mixed.sample_layout(), v1::SPLIT_THEN_STACK);
  EXPECT_EQ(mixed.bucket_hash(), v1::ID_MODULO);
  EXPECT_TRUE(mixed.short_stack_names());
}

TEST(CompleteModel, LeavesAbsentWhatMeansNone) {
  const v1::ModelConfig model = Complete(kTwoTables);
  EXPECT_FALSE(model.tables(0).has_quantization());
  EXPECT_FALSE(model.plan().has_rotation());
  EXPECT_FALSE(model.optimizer().has_clip_gradient_min());
  EXPECT_FALSE(model.optimizer().has_clip_gradient_max());
  EXPECT_FALSE(model.optimizer().has_clip_weight_min());
  EXPECT_FALSE(model.optimizer().has_clip_weight_max());
}

TEST(CompleteModel, GivesTablesWithoutAnOptimizerThatOfTheModel) {
  const v1::ModelConfig model =
      Complete(std::string(kTwoTables) +
               "optimizer { learning_rate: 0.5 sgd {} } "
               "tables { name: 'c' vocabulary_size: 1 embedding_dim: 1 optimizer { adagrad {} } } "
               "features { name: 'fc' table: 'c' }");
  EXPECT_TRUE(model.tables(0).optimizer().has_sgd());
  EXPECT_EQ(model.tables(1).optimizer().learning_rate(), 0.5f);
  // A table's own optimizer takes nothing from the model's.
  EXPECT_TRUE(model.tables(2).optimizer().has_adagrad());
  EXPECT_EQ(model.tables(2).optimizer().learning_rate(), 0.01f);
  EXPECT_TRUE(model.optimizer().has_sgd());
}

TEST(CompleteModel, KeepsZerosThatAreGiven) {
  const v1::OptimizerConfig optimizer =
      CompleteOptimizerOf("learning_rate: 0 clip_gradient_max: 0 momentum { momentum: 0 }");
  EXPECT_EQ(optimizer.learning_rate(), 0);
  EXPECT_TRUE(optimizer.has_clip_gradient_max());
  EXPECT_EQ(optimizer.momentum().momentum(), 0);
}

TEST(CompleteModel, AdamsDefaultsDependOnBiasCorrection) {
  const v1::AdamConfig tensorflow = CompleteOptimizerOf("adam {}").adam();
  EXPECT_EQ(tensorflow.epsilon(), 1e-7f);
  EXPECT_TRUE(tensorflow.sum_inside_sqrt());
  const v1::AdamConfig jax = CompleteOptimizerOf("adam { bias_correction: true }").adam();
  EXPECT_EQ(jax.epsilon(), 1e-8f);
  EXPECT_TRUE(jax.has_sum_inside_sqrt());
  EXPECT_FALSE(jax.sum_inside_sqrt());
}

TEST(CompleteModel, NamesGroupsAfterTheirTables) {
  const v1::ModelConfig model =
      Complete(std::string(kTwoTables) + "plan { groups { tables: ['b', 'a'] } }");
  EXPECT_EQ(model.plan().groups(0).name(), "b_a");
}

// A name made from long table names is longer than a given name may be, and is good all the same.
TEST(CompleteModel, LongGroupNamesStayIdempotent) {
  std::string text = "name: 'm' plan { groups { tables: ['" + std::string(128, 'x') + "', '" +
                     std::string(128, 'y') + "'] } }";
  for (char name : {'x', 'y'}) {
    const std::string quoted = "'" + std::string(128, name) + "'";
    text += "tables { name: " + quoted + " vocabulary_size: 1 embedding_dim: 1 }" +
            "features { name: " + quoted + " table: " + quoted + "}";
  }
  v1::ModelConfig model = Complete(text);
  EXPECT_EQ(model.plan().groups(0).name().size(), 257u);
  EXPECT_TRUE(CompleteModel(&model).ok());
}

// A default that is left out and the same value written down make the same optimizer, so they may
// share a stack.
TEST(CompleteModel, GroupsCompareCompleteOptimizers) {
  EXPECT_TRUE(
      ParseModel("name: 'm' tables { name: 'a' vocabulary_size: 9 embedding_dim: 8 } "
                 "tables { name: 'b' vocabulary_size: 9 embedding_dim: 8 "
                 "  optimizer { learning_rate: 0.01 adagrad { initial_accumulator: 0.1 } } } "
                 "features { name: 'fa' table: 'a' } features { name: 'fb' table: 'b' } "
                 "plan { groups { tables: ['a', 'b'] } }")
          .ok());
}

TEST(CompleteModel, LeavesABadModelAsItWas) {
  v1::ModelConfig model;
  model.set_name("m");
  model.add_tables()->set_name("t");
  const v1::ModelConfig before = model;
  EXPECT_FALSE(CompleteModel(&model).ok());
  EXPECT_TRUE(MessageDifferencer::Equals(before, model));
}

TEST(CompleteModel, TurnsMinusZeroIntoZero) {
  const v1::ModelConfig plus = Complete(
      std::string(kTwoTables) + "optimizer { clip_gradient_max: 0 ftrl { initial_linear: 0 } }");
  const v1::ModelConfig minus =
      Complete(std::string(kTwoTables) +
               "optimizer { clip_gradient_max: -0.0 ftrl { initial_linear: -0.0 } }");
  EXPECT_EQ(ModelFingerprint(plus), ModelFingerprint(minus));
}

// Fails for a new optional or enum field that has no default and is not listed as one that may stay
// absent.
void ExpectComplete(const Message& message, const std::string& path) {
  const auto& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    const std::string here = path + "." + field.name();
    const bool may_be_absent = field.name().rfind("clip_", 0) == 0 || field.name() == "rotation" ||
                               field.name() == "max_ids_per_chip_per_sample" ||
                               field.name() == "max_minibatches_per_sparsecore" ||
                               field.name() == "seed_name";
    if (field.has_optional_keyword() && !may_be_absent) {
      EXPECT_TRUE(reflection.HasField(message, &field)) << here;
    }
    if (field.enum_type() != nullptr) {
      const std::string& value = reflection.GetEnum(message, &field)->name();
      EXPECT_FALSE(absl::EndsWith(value, "_UNSPECIFIED")) << here;
    }
    if (field.message_type() == nullptr) continue;
    if (field.is_repeated()) {
      for (int k = 0; k < reflection.FieldSize(message, &field); ++k) {
        ExpectComplete(reflection.GetRepeatedMessage(message, &field, k), here);
      }
    } else if (reflection.HasField(message, &field)) {
      ExpectComplete(reflection.GetMessage(message, &field), here);
    }
  }
}

class CompleteOptimizerTest : public testing::TestWithParam<const char*> {};

TEST_P(CompleteOptimizerTest, FillsEveryFieldOnceAndForAll) {
  v1::ModelConfig model = Complete(std::string(kTwoTables) + "optimizer {" + GetParam() + " {} }");
  ExpectComplete(model, "model");
  v1::ModelConfig again = model;
  ASSERT_TRUE(CompleteModel(&again).ok());
  EXPECT_TRUE(MessageDifferencer::Equals(model, again));
}

INSTANTIATE_TEST_SUITE_P(All, CompleteOptimizerTest,
                         testing::Values("sgd", "adagrad", "rowwise_adagrad", "momentum",
                                         "adagrad_momentum", "adam", "adamw", "ftrl", "laprop",
                                         "f2a", "rmsprop", "none"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace model_test
}  // namespace emberd::config
