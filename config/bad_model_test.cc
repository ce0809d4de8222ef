// Every rule of a model description has a case here that breaks that rule alone. This would catch a
// check that is missing, that blames another field, or whose message does not say value and allowed
// range.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "config/config.h"

namespace emberd::config {
namespace bad_model_test {

// A good model. Words with @ mark the places where cases insert something; what is left of them is
// removed.
constexpr char kGoodModel[] = R"pb(
  name: "m" @model
  tables { name: "a" vocabulary_size: 100 embedding_dim: 8 @a }
  tables { name: "b" vocabulary_size: 50 embedding_dim: 8 @b }
  features { name: "fa" table: "a" @fa }
  features { name: "fb" table: "b" }
)pb";

std::string ModelWith(const std::string& find, const std::string& replacement) {
  const std::string text = absl::StrReplaceAll(kGoodModel, {{find, replacement}});
  return absl::StrReplaceAll(text, {{"@model", ""}, {"@a", ""}, {"@b", ""}, {"@fa", ""}});
}

struct BadModel {
  const char* name;
  const char* find;         // part of kGoodModel
  const char* replacement;  // makes it bad
  const char* error;        // start of the message
};

class BadModelTest : public testing::TestWithParam<BadModel> {};

TEST_P(BadModelTest, IsRefusedWithThePathOfTheField) {
  const BadModel& bad = GetParam();
  ASSERT_NE(std::string(kGoodModel).find(bad.find), std::string::npos);
  const auto model = ParseModel(ModelWith(bad.find, bad.replacement));
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(model.status().message()), testing::StartsWith(bad.error));
}

TEST(BadModel, TheModelThatTheCasesBreakIsGood) { EXPECT_TRUE(ParseModel(ModelWith("", "")).ok()); }

constexpr char kBadName[] = "it must be 1 to 128 characters of [A-Za-z0-9_.-]";

const BadModel kNames[] = {
    {"NoModelName", "name: \"m\"", "", "name: \"\" is not allowed; it must be 1 to 128"},
    {"ModelNameWithSpace", "\"m\"", "\"m m\"", "name: \"m m\" is not allowed"},
    {"ModelNameWithSlash", "\"m\"", "\"../m\"", "name: \"../m\" is not allowed"},
    {"ModelNameNotAscii", "\"m\"", "\"\303\251\"", "name: \"\\303\\251\" is not allowed"},
    {"NoTableName", "name: \"a\"", "", "tables[0].name: \"\" is not allowed"},
    {"TableNameWithNul", "name: \"a\"", "name: \"a\\000\"", "tables[0].name: \"a\\000\" is"},
    {"NoFeatureName", "name: \"fa\"", "", "features[0].name: \"\" is not allowed"},
    {"FeatureNameWithColon", "\"fb\"", "\"f:b\"", "features[1].name: \"f:b\" is not allowed"},
    {"FeatureNameWithAnEmptyPart", "\"fb\"", "\"f//b\"",
     "features[1].name: \"f//b\" is not allowed"},
    {"TwoTablesOfAName", "name: \"b\"", "name: \"a\"",
     "tables[1].name: \"a\" is not allowed; it must be unique; it is also the name of tables[0]"},
    {"TwoFeaturesOfAName", "\"fb\"", "\"fa\"",
     "features[1].name: \"fa\" is not allowed; it must be unique; it is also the name of "
     "features[0]"},
};

const BadModel kReferences[] = {
    {"FeatureOfNoTable", "table: \"a\"", "", "features[0].table: \"\" is not allowed"},
    {"FeatureOfUnknownTable", "table: \"b\"", "table: \"c\"",
     "features[1].table: \"c\" is not allowed; it must be the name of a table"},
    {"UnusedTable", "table: \"b\"", "table: \"a\"",
     "tables[1].name: \"b\" is not allowed; it must be used by at least one feature"},
};

const BadModel kTables[] = {
    {"NoVocabulary", "vocabulary_size: 100", "",
     "tables[0].vocabulary_size: 0 is not allowed; it must be in [1, 1099511627776]"},
    {"NegativeVocabulary", "vocabulary_size: 50", "vocabulary_size: -50",
     "tables[1].vocabulary_size: -50 is not allowed"},
    {"HugeVocabulary", "vocabulary_size: 50", "vocabulary_size: 1099511627777",
     "tables[1].vocabulary_size: 1099511627777 is not allowed"},
    {"NoWidth", "embedding_dim: 8 @a", "",
     "tables[0].embedding_dim: 0 is not allowed; it must be in [1, 8192]"},
    {"HugeWidth", "embedding_dim: 8 @b", "embedding_dim: 8193",
     "tables[1].embedding_dim: 8193 is not allowed"},
    {"UnknownCombiner", "@a", "combiner: 9",
     "tables[0].combiner: 9 is not allowed; it must be one of MEAN, SUM, SQRTN"},
    {"NegativeIdLimit", "@a", "max_ids_per_partition: -1",
     "tables[0].max_ids_per_partition: -1 is not allowed; it must be >= 0"},
    {"NegativeUniqueLimit", "@b", "max_unique_ids_per_partition: -5",
     "tables[1].max_unique_ids_per_partition: -5 is not allowed"},
    {"IntegerStorage", "@b", "storage_dtype: INT32",
     "tables[1].storage_dtype: INT32 is not allowed; it must be one of FLOAT32, BFLOAT16, "
     "FLOAT16"},
    {"LongIntegerStorage", "@b", "storage_dtype: INT64",
     "tables[1].storage_dtype: INT64 is not allowed"},
    {"UnknownRounding", "@a", "update_rounding: 3",
     "tables[0].update_rounding: 3 is not allowed; it must be one of NEAREST, STOCHASTIC"},
    {"StochasticRoundingOfFloat32", "@a", "update_rounding: STOCHASTIC",
     "tables[0].update_rounding: STOCHASTIC is not allowed; it must be NEAREST for a storage_dtype "
     "of FLOAT32"},
    {"UnknownNonfinitePolicy", "@a", "on_nonfinite_gradient: -1",
     "tables[0].on_nonfinite_gradient: -1 is not allowed; it must be one of REJECT, SKIP_ROW"},
    {"UnknownResultMode", "@a", "result_mode: 4",
     "tables[0].result_mode: 4 is not allowed; it must be one of AUTO, PARTIAL_SUMS, UNIQUE_ROWS"},
    {"UnknownResidency", "@a", "residency: 2",
     "tables[0].residency: 2 is not allowed; it must be one of EVICTABLE, PINNED"},
    {"NoBatch", "@fa", "batch_size: -1", "features[0].batch_size: -1 is not allowed; it must be"},
    {"NoOutput", "@fa", "output_shape: 4 output_shape: 0",
     "features[0].output_shape[1]: 0 is not allowed; it must be in [1, 2147483647]"},
    {"HugeOutput", "@fa", "output_shape: 65536 output_shape: 32768",
     "features[0].output_shape: [65536, 32768] is not allowed; it must be of at most 2147483647"},
    {"DeepOutput", "@fa", "output_shape: [1, 1, 1, 1, 1, 1, 1, 1, 1]",
     "features[0].output_shape: [1, 1, 1, 1, 1, 1, 1, 1, 1] is not allowed; it must be a list of "
     "at "
     "most 8"},
    {"OutputOfAnotherBatch", "@fa", "batch_size: 63 output_shape: [4, 16]",
     "features[0].batch_size: 63 is not allowed; it must be absent, or 64, the product of "
     "output_shape [4, 16]"},
    {"HugeBatch", "@fa", "batch_size: 2147483648", "features[0].batch_size: 2147483648 is not"},
};

const BadModel kQuantization[] = {
    {"NoBuckets", "@a", "quantization { lower: -1 upper: 1 }",
     "tables[0].quantization.num_buckets: 0 is not allowed; it must be >= 2"},
    {"OneBucket", "@a", "quantization { lower: -1 upper: 1 num_buckets: 1 }",
     "tables[0].quantization.num_buckets: 1 is not allowed"},
    {"EmptyInterval", "@b", "quantization { num_buckets: 4 }",
     "tables[1].quantization.lower: 0 is not allowed; it must be < upper = 0"},
    {"InvertedInterval", "@a", "quantization { lower: 1 upper: -1 num_buckets: 4 }",
     "tables[0].quantization.lower: 1 is not allowed; it must be < upper = -1"},
    {"InfiniteInterval", "@a", "quantization { lower: -inf upper: 1 num_buckets: 4 }",
     "tables[0].quantization.lower: -inf is not allowed; it must be finite"},
    {"OverflowingInterval", "@a", "quantization { lower: -3e38 upper: 3e38 num_buckets: 4 }",
     "tables[0].quantization.upper: 3e+38 is not allowed"},
    {"TinyInterval", "@a", "quantization { upper: 1e-38 num_buckets: 256 }",
     "tables[0].quantization.upper: 1e-38 is not allowed; it must be more than 7.49378e-37 above "
     "lower, with 256 buckets"},
};

const BadModel kInitializers[] = {
    {"NanConstant", "@a", "initializer { constant { value: nan } }",
     "tables[0].initializer.constant.value: nan is not allowed; it must be finite"},
    {"ConstantTooLargeForAFloat", "@a", "initializer { constant { value: 1e39 } }",
     "tables[0].initializer.constant.value: inf is not allowed"},
    {"InvertedUniform", "@b", "initializer { uniform { lower: 1 upper: 0 } }",
     "tables[1].initializer.uniform.lower: 1 is not allowed; it must be <= upper = 0"},
    {"InfiniteUniform", "@b", "initializer { uniform { upper: inf } }",
     "tables[1].initializer.uniform.upper: inf is not allowed"},
    {"OverflowingUniform", "@b", "initializer { uniform { lower: -3e38 upper: 3e38 } }",
     "tables[1].initializer.uniform.upper: 3e+38 is not allowed"},
    {"NegativeStddev", "@a", "initializer { normal { stddev: -0.5 } }",
     "tables[0].initializer.normal.stddev: -0.5 is not allowed; it must be >= 0"},
    {"HugeStddev", "@a", "initializer { normal { stddev: 1e38 } }",
     "tables[0].initializer.normal.stddev: 1e+38 is not allowed; it must be at most 4.14473e+37 "
     "with mean 0, so that all values are finite"},
    {"HugeMeanAndStddev", "@a", "initializer { normal { mean: -3e38 stddev: 1e37 } }",
     "tables[0].initializer.normal.stddev: 1e+37 is not allowed; it must be at most 4.90"},
    {"HugeTruncatedStddev", "@b", "initializer { truncated_normal { stddev: 2e38 } }",
     "tables[1].initializer.truncated_normal.stddev: 2e+38 is not allowed; it must be at most 1.7"},
    {"NanMean", "@a", "initializer { truncated_normal { mean: nan stddev: 1 } }",
     "tables[0].initializer.truncated_normal.mean: nan is not allowed"},
};

const BadModel kOptimizers[] = {
    {"NegativeLearningRate", "@model", "optimizer { learning_rate: -0.1 }",
     "optimizer.learning_rate: -0.1 is not allowed; it must be >= 0"},
    {"InfiniteLearningRate", "@a", "optimizer { learning_rate: inf sgd {} }",
     "tables[0].optimizer.learning_rate: inf is not allowed"},
    {"NanClip", "@a", "optimizer { clip_gradient_min: nan }",
     "tables[0].optimizer.clip_gradient_min: nan is not allowed; it must be finite"},
    {"InvertedGradientClip", "@a", "optimizer { clip_gradient_min: 1 clip_gradient_max: 0.5 }",
     "tables[0].optimizer.clip_gradient_min: 1 is not allowed; it must be <= clip_gradient_max = "
     "0.5"},
    {"InvertedWeightClip", "@model", "optimizer { clip_weight_min: 0 clip_weight_max: -2 }",
     "optimizer.clip_weight_min: 0 is not allowed; it must be <= clip_weight_max = -2"},
    {"NegativeDecay", "@b", "optimizer { weight_decay_factor: -1 }",
     "tables[1].optimizer.weight_decay_factor: -1 is not allowed; it must be >= 0"},
    {"AdagradFromZero", "@a", "optimizer { adagrad { initial_accumulator: 0 } }",
     "tables[0].optimizer.adagrad.initial_accumulator: 0 is not allowed; it must be > 0"},
    {"RowwiseAdagradFromBelowZero", "@a",
     "optimizer { rowwise_adagrad { initial_accumulator: -1 } }",
     "tables[0].optimizer.rowwise_adagrad.initial_accumulator: -1 is not allowed"},
    {"RowwiseAdagradEpsilon", "@a", "optimizer { rowwise_adagrad { epsilon: -1 } }",
     "tables[0].optimizer.rowwise_adagrad.epsilon: -1 is not allowed; it must be >= 0"},
    {"MomentumOfOne", "@a", "optimizer { momentum { momentum: 1 } }",
     "tables[0].optimizer.momentum.momentum: 1 is not allowed; it must be in [0, 1)"},
    {"AdagradMomentumMomentum", "@a", "optimizer { adagrad_momentum { momentum: -0.1 } }",
     "tables[0].optimizer.adagrad_momentum.momentum: -0.1 is not allowed"},
    {"AdagradMomentumBeta2", "@a", "optimizer { adagrad_momentum { beta2: 0 } }",
     "tables[0].optimizer.adagrad_momentum.beta2: 0 is not allowed; it must be in (0, 1]"},
    {"AdagradMomentumEpsilon", "@a", "optimizer { adagrad_momentum { epsilon: 0 } }",
     "tables[0].optimizer.adagrad_momentum.epsilon: 0 is not allowed; it must be > 0"},
    {"AdagradMomentumExponent", "@a", "optimizer { adagrad_momentum { exponent: 0 } }",
     "tables[0].optimizer.adagrad_momentum.exponent: 0 is not allowed; it must be > 0"},
    {"AdagradMomentumInitial", "@a", "optimizer { adagrad_momentum { initial_momentum: inf } }",
     "tables[0].optimizer.adagrad_momentum.initial_momentum: inf is not allowed"},
    {"AdagradMomentumFromBelowZero", "@a",
     "optimizer { adagrad_momentum { initial_accumulator: -1 } }",
     "tables[0].optimizer.adagrad_momentum.initial_accumulator: -1 is not allowed; it must be >= "
     "0"},
    {"AdamBeta1", "@b", "optimizer { adam { beta1: 1 } }",
     "tables[1].optimizer.adam.beta1: 1 is not allowed; it must be in [0, 1)"},
    {"AdamBeta2", "@b", "optimizer { adam { beta2: 1.5 } }",
     "tables[1].optimizer.adam.beta2: 1.5 is not allowed; it must be in [0, 1)"},
    {"AdamBeta2JustAboveOne", "@b", "optimizer { adam { beta2: 1.0000000001 } }",
     "tables[1].optimizer.adam.beta2: 1.0000000001 is not allowed; it must be in [0, 1)"},
    {"AdamEpsilon", "@b", "optimizer { adam { epsilon: 0 } }",
     "tables[1].optimizer.adam.epsilon: 0 is not allowed; it must be > 0"},
    {"AdamSumInsideSqrt", "@b",
     "optimizer { adam { bias_correction: true sum_inside_sqrt: true } }",
     "tables[1].optimizer.adam.sum_inside_sqrt: true is not allowed; it must be false or absent"},
    {"AdamWBeta1", "@b", "optimizer { adamw { beta1: -1 } }",
     "tables[1].optimizer.adamw.beta1: -1 is not allowed"},
    {"AdamWBeta2", "@b", "optimizer { adamw { beta2: 1 } }",
     "tables[1].optimizer.adamw.beta2: 1 is not allowed; it must be in [0, 1)"},
    {"AdamWEpsilon", "@b", "optimizer { adamw { epsilon: 0 } }",
     "tables[1].optimizer.adamw.epsilon: 0 is not allowed; it must be > 0"},
    {"AdamWDecay", "@b", "optimizer { adamw { weight_decay: -1 } }",
     "tables[1].optimizer.adamw.weight_decay: -1 is not allowed; it must be >= 0"},
    {"FtrlPower", "@a", "optimizer { ftrl { learning_rate_power: 0.5 } }",
     "tables[0].optimizer.ftrl.learning_rate_power: 0.5 is not allowed; it must be <= 0"},
    {"FtrlPowerOfTheInitialAccumulator", "@a",
     "optimizer { ftrl { learning_rate_power: -5 initial_accumulator: 1e10 } }",
     "tables[0].optimizer.ftrl.learning_rate_power: -5 is not allowed; it must be at least "
     "-3.853 with initial_accumulator 1e+10"},
    {"FtrlL1", "@a", "optimizer { ftrl { l1: -1 } }",
     "tables[0].optimizer.ftrl.l1: -1 is not allowed; it must be >= 0"},
    {"FtrlL2", "@a", "optimizer { ftrl { l2: -1 } }",
     "tables[0].optimizer.ftrl.l2: -1 is not allowed; it must be >= 0"},
    {"FtrlBeta", "@a", "optimizer { ftrl { beta: -1 } }",
     "tables[0].optimizer.ftrl.beta: -1 is not allowed; it must be >= 0"},
    {"FtrlFromZero", "@a", "optimizer { ftrl { initial_accumulator: 0 } }",
     "tables[0].optimizer.ftrl.initial_accumulator: 0 is not allowed; it must be > 0"},
    {"LaPropBeta1", "@a", "optimizer { laprop { beta1: 1 } }",
     "tables[0].optimizer.laprop.beta1: 1 is not allowed"},
    {"LaPropBeta2", "@a", "optimizer { laprop { beta2: 1 } }",
     "tables[0].optimizer.laprop.beta2: 1 is not allowed; it must be in [0, 1)"},
    {"LaPropEpsilon", "@a", "optimizer { laprop { epsilon: -1e-30 } }",
     "tables[0].optimizer.laprop.epsilon: -1e-30 is not allowed; it must be >= 0"},
    {"F2aRho", "@a", "optimizer { f2a { rho: -1 } }",
     "tables[0].optimizer.f2a.rho: -1 is not allowed; it must be >= 0"},
    {"F2aFromZero", "@a", "optimizer { f2a { initial_accumulator: 0 } }",
     "tables[0].optimizer.f2a.initial_accumulator: 0 is not allowed; it must be > 0"},
    {"F2aL1", "@a", "optimizer { f2a { l1: -1 } }",
     "tables[0].optimizer.f2a.l1: -1 is not allowed; it must be >= 0"},
    {"F2aL2", "@a", "optimizer { f2a { l2: -1 } }",
     "tables[0].optimizer.f2a.l2: -1 is not allowed; it must be >= 0"},
    {"F2aMultiplier", "@a", "optimizer { f2a { max_lr_multiplier: 0 } }",
     "tables[0].optimizer.f2a.max_lr_multiplier: 0 is not allowed; it must be > 0"},
    {"OptimizerNoneOfSome", "@a", "optimizer { none {} }",
     "tables[1].optimizer: adagrad is not allowed; it must be none for all tables of a model, "
     "or for no table; tables[0] has none"},
    {"RmsPropDecay", "@a", "optimizer { rmsprop { decay: 1 } }",
     "tables[0].optimizer.rmsprop.decay: 1 is not allowed; it must be in [0, 1)"},
    {"RmsPropMomentum", "@a", "optimizer { rmsprop { momentum: -0.5 } }",
     "tables[0].optimizer.rmsprop.momentum: -0.5 is not allowed; it must be in [0, 1)"},
    {"RmsPropEpsilon", "@model", "optimizer { rmsprop { epsilon: 0 } }",
     "optimizer.rmsprop.epsilon: 0 is not allowed; it must be > 0"},
    {"CustomRule", "@a", "optimizer { custom { expression: 'w = w - lr * gg' } }",
     "tables[0].optimizer.custom: expression: line 1, column 14: expected a number, a name or "
     "\"(\", not \"gg\"; did you mean \"g\"?"},
    {"CustomSlot", "@model",
     "optimizer { custom { expression: 'w = g' slots { name: 'a' initial_value: inf } } }",
     "optimizer.custom.slots[0].initial_value: inf is not allowed; it must be finite"},
    {"CustomParameter", "@model",
     "optimizer { custom { expression: 'w = g' hyper_parameters { name: 'a' value: nan } } }",
     "optimizer.custom.hyper_parameters[0].value: nan is not allowed; it must be finite"},
};

const BadModel kPlans[] = {
    {"UnknownRules", "@model", "plan { rules: 3 }",
     "plan.rules: 3 is not allowed; it must be one of JAX, TENSORFLOW"},
    {"UnknownLayout", "@model", "plan { sample_layout: -1 }",
     "plan.sample_layout: -1 is not allowed; it must be one of SPLIT_THEN_STACK"},
    {"UnknownHash", "@model", "plan { bucket_hash: 5 }", "plan.bucket_hash: 5 is not allowed"},
    {"NegativeRotation", "@model", "plan { rotation: -1 }",
     "plan.rotation: -1 is not allowed; it must be in [0, 1023]"},
    {"NegativeActivationLimit", "@model", "plan { activation_bytes_limit: -1 }",
     "plan.activation_bytes_limit: -1 is not allowed; it must be >= 0"},
    {"NegativeShardLimit", "@model", "plan { shard_bytes_limit: -1 }",
     "plan.shard_bytes_limit: -1 is not allowed; it must be >= 0"},
    {"IdsPerSample", "@model", "plan { max_ids_per_chip_per_sample: 65537 }",
     "plan.max_ids_per_chip_per_sample: 65537 is not allowed; it must be in [0, 65536]"},
    {"Minibatches", "@model", "plan { max_minibatches_per_sparsecore: 65 }",
     "plan.max_minibatches_per_sparsecore: 65 is not allowed; it must be in [0, 64]"},
};

const BadModel kGroups[] = {
    {"EmptyGroup", "@model", "plan { groups { name: \"g\" } }", "plan.groups[0].tables: empty"},
    {"GroupOfUnknownTable", "@model", "plan { groups { tables: [\"a\", \"x\"] } }",
     "plan.groups[0].tables[1]: \"x\" is not allowed; it must be the name of a table"},
    {"TableInTwoGroups", "@model",
     "plan { groups { tables: \"a\" } groups { tables: [\"b\", \"a\"] } }",
     "plan.groups[1].tables[1]: \"a\" is not allowed; it must be in one group only, once; it is "
     "also plan.groups[0].tables[0]"},
    {"TableTwiceInAGroup", "@model", "plan { groups { tables: [\"a\", \"a\"] } }",
     "plan.groups[0].tables[1]: \"a\" is not allowed; it must be in one group only, once"},
    {"GroupName", "@model", "plan { groups { name: \"a b\" tables: \"a\" } }",
     "plan.groups[0].name: \"a b\" is not allowed; it must be characters of [A-Za-z0-9_.-]"},
    {"TwoGroupsOfAName", "@model",
     "plan { groups { tables: \"a\" } groups { name: \"a\" tables: \"b\" } }",
     "plan.groups[1].name: \"a\" is not allowed; it must be unique; it is also the name of "
     "plan.groups[0]"},
    {"GroupOfTwoOptimizers", "@b",
     "optimizer { sgd {} } } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same optimizer "
     "as \"a\""},
    {"GroupOfTwoLearningRates", "@b",
     "optimizer { learning_rate: 0.5 } } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same optimizer"},
    {"GroupPartlyQuantized", "@b",
     "quantization { upper: 1 num_buckets: 2 } } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same "
     "quantization as \"a\""},
    {"GroupOfTwoStorageTypes", "@b",
     "storage_dtype: BFLOAT16 } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same "
     "storage_dtype as \"a\""},
    {"GroupOfTwoPolicies", "@b",
     "on_nonfinite_gradient: SKIP_ROW } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same "
     "on_nonfinite_gradient as \"a\""},
    {"GroupOfTwoResultModes", "@b",
     "result_mode: UNIQUE_ROWS } plan { groups { tables: [\"a\", \"b\"] }",
     "plan.groups[0].tables[1]: \"b\" is not allowed; it must be a table with the same "
     "result_mode as \"a\""},
};

const BadModel kResources[] = {
    {"ResourceWithoutAName", "@a", "resource { container: \"c\" }",
     "tables[0].resource.name: \"\" is not allowed; it must be 1 to 128"},
    {"ResourceNameWithSlash", "@a", "resource { name: \"a/b\" }",
     "tables[0].resource.name: \"a/b\" is not allowed"},
    {"ContainerWithSlash", "@b", "resource { name: \"r\" container: \"a/b\" }",
     "tables[1].resource.container: \"a/b\" is not allowed; it must be 0 to 128"},
    {"SeedNameWithSlash", "@b", "seed_name: \"a/b\"",
     "tables[1].seed_name: \"a/b\" is not allowed; it must be 1 to 128"},
    {"EmptySeedName", "@b", "seed_name: \"\"",
     "tables[1].seed_name: \"\" is not allowed; it must be 1 to 128"},
    {"ResourceOfTwoTablesThatDiffer", "@b",
     "resource { name: \"r\" } } enable_variable_deduplication: true"
     " features { name: \"fc\" table: \"c\" }"
     " tables { name: \"c\" vocabulary_size: 1 embedding_dim: 1 resource { name: \"r\" }",
     "tables[2] \"c\": resource \"r\" is that of table \"b\", too, and the tables must agree; "
     "first "
     "difference: vocabulary_size: "},
    {"SharedTableInAGroup", "@b",
     "resource { name: \"r\" } } enable_variable_deduplication: true"
     " plan { groups { tables: [\"a\", \"b\"] }",
     "The following flags are incompatible: plan.groups[0].tables[1] \"b\" and "
     "enable_variable_deduplication. Only enable one of the flags."},
    {"SharedTableRoundedAtRandom", "@a",
     "resource { name: \"r\" } storage_dtype: BFLOAT16 update_rounding: STOCHASTIC }"
     " enable_variable_deduplication: true plan { groups { tables: \"a\" }",
     "The following flags are incompatible: tables[0].update_rounding STOCHASTIC, "
     "plan.groups[0].tables[0] \"a\" and enable_variable_deduplication. Only enable one"},
    {"SharedTableThatAClientFills", "@a",
     "resource { name: \"r\" } initializer { assigned {} } } enable_variable_deduplication: true "
     "plan { rotation: 1",
     "The following flags are incompatible: tables[0].initializer assigned and "
     "enable_variable_deduplication. Only enable one"},
};

std::string NameOf(const testing::TestParamInfo<BadModel>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Names, BadModelTest, testing::ValuesIn(kNames), NameOf);
INSTANTIATE_TEST_SUITE_P(References, BadModelTest, testing::ValuesIn(kReferences), NameOf);
INSTANTIATE_TEST_SUITE_P(Tables, BadModelTest, testing::ValuesIn(kTables), NameOf);
INSTANTIATE_TEST_SUITE_P(Quantization, BadModelTest, testing::ValuesIn(kQuantization), NameOf);
INSTANTIATE_TEST_SUITE_P(Initializers, BadModelTest, testing::ValuesIn(kInitializers), NameOf);
INSTANTIATE_TEST_SUITE_P(Optimizers, BadModelTest, testing::ValuesIn(kOptimizers), NameOf);
INSTANTIATE_TEST_SUITE_P(Plans, BadModelTest, testing::ValuesIn(kPlans), NameOf);
INSTANTIATE_TEST_SUITE_P(Resources, BadModelTest, testing::ValuesIn(kResources), NameOf);
INSTANTIATE_TEST_SUITE_P(Groups, BadModelTest, testing::ValuesIn(kGroups), NameOf);

TEST(BadModel, NamesEndAt128Characters) {
  EXPECT_TRUE(ParseModel(ModelWith("\"m\"", "\"" + std::string(128, 'n') + "\"")).ok());
  const auto model = ParseModel(ModelWith("\"m\"", "\"" + std::string(129, 'n') + "\""));
  EXPECT_THAT(std::string(model.status().message()), testing::EndsWith(kBadName));
}

TEST(BadModel, NormalValuesMayReachTheLargestFloat) {
  for (const char* good : {"normal { stddev: 4.1e37 }", "truncated_normal { stddev: 1.7e38 }",
                           "normal { mean: 3.4028234e38 }"}) {
    const std::string initializer = absl::StrCat("initializer { ", good, " }");
    EXPECT_TRUE(ParseModel(ModelWith("@a", initializer)).ok()) << good;
  }
}

TEST(BadModel, NeedsTablesAndFeatures) {
  EXPECT_EQ(ParseModel("name: 'm'").status().message(), "tables: empty; at least one is needed");
  EXPECT_EQ(ParseModel("name: 'm' tables { name: 'a' vocabulary_size: 1 embedding_dim: 1 }")
                .status()
                .message(),
            "features: empty; at least one is needed");
}

}  // namespace bad_model_test
}  // namespace emberd::config
