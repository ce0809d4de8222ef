#include <set>
#include <string>

#include <gtest/gtest.h>

#include "config/config.h"

namespace emberd::config {
namespace fingerprint_test {

v1::ModelConfig Model(const std::string& more = "", const std::string& table = "") {
  const auto model =
      ParseModel("name: 'm' tables { name: 'a' vocabulary_size: 100 embedding_dim: 8 " + table +
                 " } features { name: 'f' table: 'a' } " + more);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : v1::ModelConfig();
}

// A model id is kept by clients and by what shards store. If this number changes, a cluster that is
// restarted with a new binary no longer knows its models: it must change only together with a
// default or the meaning of a field.
TEST(ModelFingerprint, IsTheSameInEveryProcessAndRelease) {
  EXPECT_EQ(ModelFingerprint(Model()), 10393523486717381976u);
}

TEST(ModelFingerprint, DoesNotDependOnHowTheModelIsWritten) {
  const auto reordered = ParseModel(
      R"({"features": [{"table": "a", "name": "f", "batch_size": 1}],
          "tables": [{"embedding_dim": 8, "combiner": "MEAN", "vocabulary_size": 100,
                      "name": "a"}],
          "plan": {"auto_stack": true}, "name": "m"})");
  ASSERT_TRUE(reordered.ok()) << reordered.status();
  EXPECT_EQ(ModelFingerprint(*reordered), ModelFingerprint(Model()));
  EXPECT_EQ(FirstDifference(*reordered, Model()), "");
}

struct Difference {
  const char* more;   // added to the model
  const char* table;  // added to its table
  const char* text;   // what FirstDifference says
};

const Difference kDifferences[] = {
    {"seed: 5", "", "seed: 0 in the declared model, 5 in the requested one"},
    {"", "residency: PINNED",
     "tables[0].residency: EVICTABLE in the declared model, PINNED in the requested one"},
    {"", "combiner: SUM", "tables[0].combiner: MEAN in the declared model, SUM in the requested"},
    {"", "initializer { zeros {} }",
     "tables[0].initializer.zeros: absent in the declared model, {} in the requested one"},
    {"", "optimizer { learning_rate: 0.5 }",
     "tables[0].optimizer.learning_rate: 0.01 in the declared model, 0.5 in the requested one"},
    {"", "optimizer { adam {} }",
     "tables[0].optimizer.adagrad: {initial_accumulator: 0.1} in the declared model, absent in"},
    {"", "quantization { upper: 1 num_buckets: 2 }",
     "tables[0].quantization: absent in the declared model, {upper: 1 num_buckets: 2} in the"},
    {"features { name: 'g' table: 'a' }", "",
     "features[1]: absent in the declared model, {name: \"g\" table: \"a\" batch_size: 1} in"},
    {"plan { rotation: 0 }", "", "plan.rotation: absent in the declared model, 0 in the requested"},
    {"plan { allow_id_dropping: true }", "",
     "plan.allow_id_dropping: false in the declared model, true in the requested one"},
    {"optimizer { clip_weight_max: 1 }", "",
     "tables[0].optimizer.clip_weight_max: absent in the declared model, 1 in the requested one"},
};

TEST(FirstDifference, NamesTheFieldAndBothValues) {
  std::set<uint64_t> fingerprints = {ModelFingerprint(Model())};
  for (const Difference& row : kDifferences) {
    const v1::ModelConfig model = Model(row.more, row.table);
    EXPECT_EQ(FirstDifference(Model(), model).rfind(row.text, 0), 0u)
        << FirstDifference(Model(), model) << "\nexpected " << row.text;
    EXPECT_TRUE(fingerprints.insert(ModelFingerprint(model)).second) << row.text;
  }
}

TEST(DifferInSamplesAlone, IsTrueOfNothingElse) {
  const v1::ModelConfig of_64 = Model("features { name: 'g' table: 'a' output_shape: [64, 5] }");
  v1::ModelConfig other = Model("features { name: 'g' table: 'a' output_shape: [32, 5] }");
  EXPECT_TRUE(DifferInSamplesAlone(of_64, other));
  other.mutable_features(0)->set_batch_size(7);
  EXPECT_TRUE(DifferInSamplesAlone(of_64, other));
  other.set_seed(1);
  EXPECT_FALSE(DifferInSamplesAlone(of_64, other));
  EXPECT_FALSE(DifferInSamplesAlone(
      of_64, Model("features { name: 'g' table: 'a' output_shape: [64, 4] }")));
  EXPECT_FALSE(DifferInSamplesAlone(of_64, Model("features { name: 'g' table: 'a' }")));
  EXPECT_FALSE(DifferInSamplesAlone(of_64, Model()));
  EXPECT_FALSE(DifferInSamplesAlone(Model(), of_64));
}

TEST(FirstDifference, IsTheFirstInFieldOrder) {
  v1::ModelConfig model = Model("seed: 1 plan { rotation: 1 }", "combiner: SUM");
  model.set_name("n");
  EXPECT_EQ(FirstDifference(Model(), model),
            "name: \"m\" in the declared model, \"n\" in the requested one");
  model.set_name("m");
  EXPECT_EQ(FirstDifference(Model(), model),
            "tables[0].combiner: MEAN in the declared model, SUM in the requested one");
}

TEST(FirstDifference, ATableThatIsGone) {
  v1::ModelConfig two = Model();
  v1::TableConfig& added = *two.add_tables();
  added = two.tables(0);
  added.set_name("b");
  EXPECT_EQ(FirstDifference(two, Model()).rfind("tables[1]: {name: \"b\"", 0), 0u);
}

}  // namespace fingerprint_test
}  // namespace emberd::config
