#include "config/shared_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "config/config.h"

namespace emberd::config {
namespace shared_tables_test {

using testing::HasSubstr;

v1::ModelConfig SharingModel(const std::string& name, const std::string& table,
                             const std::string& rest = "") {
  const auto model = ParseModel(absl::StrCat(
      "name: '", name, "' enable_variable_deduplication: true ", rest,
      " tables { name: 't' vocabulary_size: 100 embedding_dim: 8",
      " resource { container: 'c' name: 'r' } ", table, " } features { name: 'f' table: 't' }"));
  EXPECT_TRUE(model.ok()) << model.status();
  return model.value_or(v1::ModelConfig());
}

TEST(SharedTables, AResourceIsNamedWithItsContainer) {
  v1::TableResource resource;
  resource.set_name("users");
  EXPECT_EQ(ResourceText(resource), "users");
  resource.set_container("ctr");
  EXPECT_EQ(ResourceText(resource), "ctr/users");
}

TEST(SharedTables, WhatDoesNotTouchRowsMayDiffer) {
  const auto held = SharingModel("a", "combiner: SUM max_ids_per_partition: 64");
  const auto other =
      SharingModel("b", "max_unique_ids_per_partition: 8",
                   "tables { name: 'own' vocabulary_size: 3 embedding_dim: 4 } "
                   "features { name: 'own' table: 'own' } plan { rules: TENSORFLOW }");
  EXPECT_TRUE(CheckSameShared(held, other).ok());
  EXPECT_EQ(CommonResource(held, other), "c/r");
  EXPECT_EQ(CheckAlone(held, other).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasSharedTables(held));
}

TEST(SharedTables, ModelsWithOtherResourcesHaveNothingInCommon) {
  const auto held = SharingModel("a", "");
  auto other = SharingModel("b", "", "seed: 7");
  other.mutable_tables(0)->mutable_resource()->set_container("d");
  EXPECT_EQ(CommonResource(held, other), "");
  EXPECT_TRUE(CheckAlone(held, other).ok());
  EXPECT_TRUE(CheckSameShared(held, other).ok());
  other.mutable_tables(0)->clear_resource();
  EXPECT_FALSE(HasSharedTables(other));
}

struct Difference {
  const char* table;
  const char* rest;
  const char* error;
};

// A field that is not compared would let two models make different rows under one name.
TEST(SharedTables, TheFirstDifferenceIsNamed) {
  const Difference kDifferences[] = {
      {"", "seed: 7", "seed: 0 in the declared model, 7 in the requested one"},
      {"storage_dtype: BFLOAT16", "", "storage_dtype: FLOAT32 in the declared model, BFLOAT16"},
      {"optimizer { sgd {} }", "", "optimizer."},
      {"optimizer { learning_rate: 0.5 }", "", "optimizer.learning_rate: 0.01 in the declared"},
      {"optimizer { adagrad { initial_accumulator: 0.2 } }", "",
       "optimizer.adagrad.initial_accumulator: 0.1 in the declared model, 0.2 in the"},
      {"optimizer { clip_weight_max: 3 }", "", "optimizer.clip_weight_max: absent in"},
      {"initializer { zeros {} }", "", "initializer."},
      {"initializer { truncated_normal { stddev: 2 } }", "",
       "initializer.truncated_normal.stddev: "},
      {"on_nonfinite_gradient: SKIP_ROW", "", "on_nonfinite_gradient: REJECT in the"},
      {"result_mode: UNIQUE_ROWS", "", "result_mode: AUTO in the"},
      {"quantization { upper: 1 num_buckets: 4 }", "", "quantization: absent in the"},
  };
  const auto held = SharingModel("a", "");
  for (const Difference& difference : kDifferences) {
    const absl::Status status =
        CheckSameShared(held, SharingModel("b", difference.table, difference.rest));
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << difference.error;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("tables[0] \"t\": resource \"c/r\" is held by model 'a', "
                                       "and the tables must agree; first difference: ",
                                       difference.error)));
  }
  for (const auto& change : {+[](v1::TableConfig* table) { table->set_vocabulary_size(99); },
                             +[](v1::TableConfig* table) { table->set_embedding_dim(4); },
                             +[](v1::TableConfig* table) { table->set_seed_name("u"); }}) {
    auto other = SharingModel("b", "");
    change(other.mutable_tables(0));
    EXPECT_EQ(CheckSameShared(held, other).code(), absl::StatusCode::kAlreadyExists);
  }
}

constexpr char kTwoViews[] = R"(
  name: 'two' tables { name: 'u' vocabulary_size: 100 embedding_dim: 8 combiner: SUM
                       resource { container: 'c' name: 'r' } }
  tables { name: 'v' vocabulary_size: 100 embedding_dim: 8 optimizer { adagrad {} }
           max_ids_per_partition: 8 resource { container: 'c' name: 'r' } }
  tables { name: 'own' vocabulary_size: 9 embedding_dim: 8 }
  features { name: 'f' table: 'v' } features { name: 'g' table: 'u' }
  features { name: 'h' table: 'own' } enable_variable_deduplication: )";

TEST(SharedTables, TablesOfOneResourceAreViewsOfTheFirst) {
  const auto model = ParseModel(absl::StrCat(kTwoViews, "true"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(StoredName(*model, "u"), "u");
  EXPECT_EQ(StoredName(*model, "v"), "u");
  EXPECT_EQ(StoredName(*model, "own"), "own");
  EXPECT_EQ(StoredName(*model, "else"), "else");
  EXPECT_EQ(SeedName(*model, model->tables(1)), "u");
  const auto refused = [&](void (*change)(v1::ModelConfig&), const std::string& error) {
    v1::ModelConfig other = *model;
    change(other);
    const absl::Status status = CompleteModel(&other);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << error;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("tables[1] \"v\": resource \"c/r\" is that of table \"u\", "
                                       "too, and the tables must agree; first difference: ",
                                       error)));
  };
  refused([](v1::ModelConfig& m) { m.mutable_tables(1)->set_embedding_dim(4); },
          "embedding_dim: 8 of \"u\", 4 of \"v\"");
  refused([](v1::ModelConfig& m) { m.mutable_tables(1)->set_seed_name("v"); },
          "seed_name: \"u\" of \"u\", \"v\" of \"v\"");
  refused([](v1::ModelConfig& m) { m.mutable_tables(1)->mutable_optimizer()->mutable_sgd(); },
          "optimizer.");
}

TEST(SharedTables, WithoutTheFlagAResourceIsIgnored) {
  const auto model = ParseModel(absl::StrCat(kTwoViews, "false"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_FALSE(HasSharedTables(*model));
  EXPECT_EQ(StoredName(*model, "v"), "v");
  EXPECT_EQ(SeedName(*model, model->tables(1)), "v");
}

// A model that joins rows must keep what they began with when their first model is gone, and be
// found by whoever declares it as before.
TEST(SharedTables, TheFirstModelNamesWhatRowsBeginWith) {
  const auto held = SharingModel("a", "");
  auto joins = *ParseModel(absl::StrCat(kTwoViews, "true"));
  const auto asked_for = joins;
  AdoptSeedNames(held, &joins);
  EXPECT_EQ(SeedName(joins, joins.tables(0)), "t");
  EXPECT_EQ(SeedName(joins, joins.tables(1)), "t");
  EXPECT_EQ(SeedName(joins, joins.tables(2)), "own");
  EXPECT_TRUE(CheckSameShared(held, joins).ok());
  EXPECT_EQ(CheckSameShared(held, asked_for).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(DifferInSamplesAlone(joins, asked_for));
  EXPECT_FALSE(DifferInSamplesAlone(asked_for, joins));
  v1::ModelConfig again = joins;
  EXPECT_TRUE(CompleteModel(&again).ok());
  EXPECT_EQ(ModelFingerprint(again), ModelFingerprint(joins));
  // Nothing to fill in where the names agree, so that models of before stay the same.
  auto same = SharingModel("b", "");
  AdoptSeedNames(held, &same);
  EXPECT_FALSE(same.tables(0).has_seed_name());
}

}  // namespace shared_tables_test
}  // namespace emberd::config
