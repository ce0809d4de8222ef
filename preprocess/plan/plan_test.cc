#include "preprocess/plan/plan.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/testing/seed.h"
#include "preprocess/testing/numberings.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace plan_test {

using testing::ElementsAre;
using testing::HasSubstr;

void AddTable(v1::ModelConfig* model, const std::string& name, int64_t rows, int dim,
              int64_t batch = 8) {
  v1::TableConfig* table = model->add_tables();
  table->set_name(name);
  table->set_vocabulary_size(rows);
  table->set_embedding_dim(dim);
  table->mutable_optimizer()->mutable_sgd();
  v1::FeatureConfig* feature = model->add_features();
  feature->set_name("f_" + name);
  feature->set_table(name);
  feature->set_batch_size(batch);
}

std::vector<std::string> StackNames(const v1::ModelConfig& model, Topology topology = {2, 4}) {
  const auto plan = MakePlan(model, topology);
  EXPECT_TRUE(plan.ok()) << plan.status();
  std::vector<std::string> names;
  if (plan.ok()) {
    for (const StackPlan& stack : plan->stacks) names.push_back(stack.name);
  }
  return names;
}

// Would catch: anything about rows that depends on how partitions are dealt to shards. Restoring a
// table on another number of shards, and equal bits for any number of them, rest on this. The rules
// of TensorFlow rotate by the SparseCores of a shard, unless the plan names a rotation.
TEST(PlanTest, PlacementDependsOnPartitionsAlone) {
  Random random(TestSeed(1));
  for (int n = 0; n < 300; ++n) {
    RandomCase c = MakeRandomCase(random, /*limits=*/false);
    v1::PlanConfig* named = c.model.mutable_plan();
    if (named->rules() == v1::TENSORFLOW && !named->has_rotation()) named->set_rotation(3);
    const auto one = MakePlan(c.model, {1, 8});
    for (Topology topology : {Topology{2, 4}, Topology{4, 2}, Topology{8, 1}}) {
      const auto other = MakePlan(c.model, topology);
      ASSERT_TRUE(one.ok() && other.ok());
      ASSERT_EQ(one->stacks.size(), other->stacks.size());
      for (size_t k = 0; k < one->stacks.size(); ++k) {
        const StackPlan& a = one->stacks[k];
        const StackPlan& b = other->stacks[k];
        EXPECT_EQ(a.name, b.name);
        EXPECT_EQ(a.rows_per_partition, b.rows_per_partition);
        for (size_t t = 0; t < a.tables.size(); ++t) {
          EXPECT_EQ(a.tables[t].row_offset, b.tables[t].row_offset);
          EXPECT_EQ(a.tables[t].shard_rotation, b.tables[t].shard_rotation);
        }
      }
      EXPECT_NE(one->fingerprint, other->fingerprint);
    }
  }
}

TEST(PlanTest, EveryRowHasAPlaceOfItsOwn) {
  Random random(TestSeed(1));
  for (int n = 0; n < 300; ++n) {
    const RandomCase c = MakeRandomCase(random, /*limits=*/false);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok());
    for (const StackPlan& stack : plan->stacks) {
      EXPECT_EQ(stack.rows_per_partition % 8, 0);
      EXPECT_EQ(stack.embedding_dim % 8, 0);
      std::set<int64_t> taken;
      for (const TablePlan& table : stack.tables) {
        const RowPlacement placement = {plan->topology.partitions(), table.shard_rotation,
                                        table.row_offset};
        for (int64_t id = 0; id < table.vocabulary_size; ++id) {
          const int64_t row = placement.LocalRow(id);
          EXPECT_LT(row, stack.rows_per_partition);
          EXPECT_TRUE(taken.insert(PhysicalRow(placement, id, stack.rows_per_partition)).second);
          EXPECT_EQ(TableRow(placement, placement.Partition(id), row), id);
        }
      }
    }
  }
}

TEST(PlanTest, DefaultRotationIsOddAndGolden) {
  EXPECT_EQ(DefaultRotation(1), 0);
  EXPECT_EQ(DefaultRotation(2), 1);
  EXPECT_EQ(DefaultRotation(4), 3);
  EXPECT_EQ(DefaultRotation(8), 5);
  EXPECT_EQ(DefaultRotation(16), 9);
  EXPECT_EQ(DefaultRotation(512), 317);
}

TEST(PlanTest, AutomaticStacksAndGroups) {
  v1::ModelConfig model;
  AddTable(&model, "c", 100, 8);
  AddTable(&model, "a", 100, 7);
  AddTable(&model, "wide", 100, 16);
  EXPECT_THAT(StackNames(model), ElementsAre("c_a", "wide"));
  model.mutable_plan()->set_rules(v1::TENSORFLOW);
  EXPECT_THAT(StackNames(model), ElementsAre("a_c", "wide"));
  model.mutable_plan()->set_auto_stack(false);
  EXPECT_THAT(StackNames(model), ElementsAre("c", "a", "wide"));
  v1::StackGroup* group = model.mutable_plan()->add_groups();
  group->add_tables("wide");
  group->add_tables("a");
  EXPECT_THAT(StackNames(model), ElementsAre("wide_a", "c"));
  group->set_name("mine");
  const auto plan = MakePlan(model, {2, 4});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->stacks[0].name, "mine");
  EXPECT_EQ(plan->stacks[0].embedding_dim, 16);
  EXPECT_EQ(plan->table_at[2].stack, 0);
  EXPECT_EQ(plan->table_at[1].position, 1);
  EXPECT_EQ(plan->feature_at[0].stack, 1);
}

TEST(PlanTest, TheTightestLimitHolds) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 8);
  AddTable(&model, "b", 100, 8);
  AddTable(&model, "c", 100, 8);
  model.mutable_tables(0)->set_max_ids_per_partition(100);
  model.mutable_tables(1)->set_max_ids_per_partition(50);
  const auto plan = MakePlan(model, {1, 1});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->stacks[0].limits.ids, 50);
  EXPECT_EQ(plan->stacks[0].limits.unique, 0);
}

TEST(PlanTest, TheCapacityIsThatOfTheRulesIfNothingIsSaid) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 8, 1024);
  const auto planned = [&] {
    const auto plan = MakePlan(model, {1, 1});
    return PlanToProto(model, plan.value()).stacks(0);
  };
  EXPECT_EQ(planned().max_ids_per_chip_per_sample(), 0);
  EXPECT_EQ(planned().max_minibatches_per_sparsecore(), 0);
  model.mutable_plan()->set_rules(v1::TENSORFLOW);
  EXPECT_EQ(planned().max_ids_per_chip_per_sample(), 64);
  EXPECT_EQ(planned().max_minibatches_per_sparsecore(), 64);
  model.mutable_plan()->set_max_ids_per_chip_per_sample(0);
  model.mutable_plan()->set_max_minibatches_per_sparsecore(3);
  EXPECT_EQ(planned().max_ids_per_chip_per_sample(), 0);
  EXPECT_EQ(planned().max_minibatches_per_sparsecore(), 3);
}

// Of the samples of all replicas by JAX's rules, and so the same stacks for each number of shards;
// of those of one replica by TensorFlow's.
TEST(PlanTest, TheLimitOfActivationsHoldsForOneSparseCore) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 8, 1024);
  AddTable(&model, "b", 100, 8, 1024);
  const auto stacks = [&](int64_t limit, Topology topology) {
    model.mutable_plan()->set_activation_bytes_limit(limit);
    return StackNames(model, topology).size();
  };
  constexpr int64_t kOfFour = 2 * 8 * 4 * 1024 / 4;  // two tables of 8 columns
  for (const Topology topology : {Topology{1, 4}, Topology{2, 2}, Topology{4, 1}}) {
    EXPECT_EQ(stacks(kOfFour, topology), 1);
    EXPECT_EQ(stacks(kOfFour - 1, topology), 2);
  }
  model.mutable_plan()->set_rules(v1::TENSORFLOW);
  EXPECT_EQ(stacks(2 * kOfFour + 1, {2, 2}), 1);
  EXPECT_EQ(stacks(2 * kOfFour, {2, 2}), 2);  // it must stay below
}

TEST(PlanTest, WarnsOfWhatMayNotBeMeant) {
  v1::ModelConfig model;
  AddTable(&model, "tiny", 3, 8);
  AddTable(&model, "narrow", 100000, 4);
  AddTable(&model, "usual", 5000, 8);
  const auto warnings = [&](Topology topology) {
    const auto plan = MakePlan(model, topology);
    EXPECT_TRUE(plan.ok()) << plan.status();
    const v1::ModelPlan proto = PlanToProto(model, *plan);
    return std::vector<std::string>(proto.warnings().begin(), proto.warnings().end());
  };
  const std::string narrow =
      "'narrow' of 100000 x 4 is stored as 106496 x 8; rows of a partition and columns come in "
      "eights";
  EXPECT_THAT(warnings({512, 2}),
              ElementsAre("SMALL TABLE: 'tiny' of 3 x 8 is stored as 8192 x 8; it has less than 8 "
                          "rows for each of 1024 partitions",
                          narrow));
  model.mutable_tables(1)->set_embedding_dim(8);
  model.mutable_tables(0)->set_vocabulary_size(5);
  EXPECT_THAT(warnings({1, 1}), ElementsAre());
  EXPECT_THAT(warnings({1, 1, /*assumed=*/true}),
              ElementsAre("the cluster's sparsecores_per_shard is not given: 1 are assumed, and "
                          "where rows lie rests on it"));
}

TEST(PlanTest, NamesWhatIsWrong) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 8);
  AddTable(&model, "b", 100, 8);
  model.mutable_tables(1)->mutable_optimizer()->mutable_adagrad();
  v1::StackGroup* group = model.mutable_plan()->add_groups();
  group->add_tables("a");
  group->add_tables("b");
  EXPECT_THAT(std::string(MakePlan(model, {1, 1}).status().message()),
              testing::AllOf(HasSubstr("plan.groups[0]"), HasSubstr("'a' and 'b'"),
                             HasSubstr("optimizer")));
  group->mutable_tables()->RemoveLast();
  group->set_name("b");
  EXPECT_THAT(std::string(MakePlan(model, {1, 1}).status().message()),
              HasSubstr("two stacks are named 'b'"));
  group->set_name("");
  model.mutable_tables(0)->set_vocabulary_size(int64_t{1} << 31);
  EXPECT_THAT(std::string(MakePlan(model, {1, 1}).status().message()),
              testing::AllOf(HasSubstr("tables[0].vocabulary_size"), HasSubstr("2147483648")));
  EXPECT_FALSE(MakePlan(model, {3, 1}).ok());
  EXPECT_FALSE(MakePlan(model, {1, 0}).ok());
}

TEST(PlanTest, APartitionHasAsManyRowsAsItsNumbersHold) {
  const auto refusal = [](int64_t rows, Topology topology) {
    v1::ModelConfig model;
    AddTable(&model, "t", rows, 8);
    const auto plan = MakePlan(model, topology);
    return plan.ok() ? "" : std::string(plan.status().message());
  };
  EXPECT_EQ(refusal(int64_t{1} << 40, {256, 4}), "");  // the largest table that a config allows
  EXPECT_EQ(refusal((int64_t{1} << 31) - 8, {1, 1}), "");
  EXPECT_EQ(refusal(int64_t{1} << 31, {1, 2}), "");
  EXPECT_EQ(refusal(int64_t{1} << 31, {1, 1}),
            "tables[0].vocabulary_size: 2147483648 makes stack 't' 2147483648 rows long in each of "
            "1 partitions; with 1 SparseCores per shard a partition holds at most 2147483640 rows "
            "of a stack. Use more shards, or put the tables into several groups");
  EXPECT_THAT(refusal(int64_t{1} << 40, {128, 8}),
              HasSubstr("with 8 SparseCores per shard a partition holds at most 536870912 rows"));
}

TEST(PlanTest, BytesThatNobodyCanCountAreRefused) {
  v1::ModelConfig model;
  model.mutable_plan()->set_auto_stack(false);
  for (int t = 0; t < 250; ++t) {
    AddTable(&model, absl::StrCat("t", t), int64_t{1} << 40, 8192);
    model.mutable_tables(t)->set_storage_dtype(v1::FLOAT32);
  }
  const auto refused = MakePlan(model, {256, 4});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("they take 9.0072e+18 bytes; they may take 9e+18 with their slots"));
  model.mutable_tables()->RemoveLast();
  model.mutable_features()->RemoveLast();
  const auto plan = MakePlan(model, {256, 4});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(PlanToProto(model, *plan).table_bytes(), 249 * (int64_t{1} << 55));
}

TEST(PlanTest, ProtoShowsThePlan) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 6, 32);
  AddTable(&model, "b", 50, 5, 16);
  for (v1::TableConfig& table : *model.mutable_tables()) table.set_storage_dtype(v1::FLOAT32);
  const auto plan = MakePlan(model, {2, 4});
  ASSERT_TRUE(plan.ok());
  const v1::ModelPlan proto = PlanToProto(model, *plan);
  EXPECT_EQ(proto.partitions(), 8);
  ASSERT_EQ(proto.stacks_size(), 1);
  const v1::StackPlan& stack = proto.stacks(0);
  EXPECT_EQ(stack.name(), "a_b");
  EXPECT_EQ(stack.vocabulary_size(), 192);
  EXPECT_EQ(stack.rows_per_partition(), 24);
  EXPECT_EQ(stack.tables(1).row_offset(), 16);
  EXPECT_EQ(stack.tables(1).shard_rotation(), 5);
  EXPECT_EQ(stack.features(1).table(), "b");
  EXPECT_EQ(stack.features(1).row_offset(), 32);
  EXPECT_EQ(stack.features(1).col_offset(), 128);
  EXPECT_EQ(stack.optimizer(), "sgd");
  EXPECT_EQ(stack.bytes_per_partition(), 24 * 8 * 4);
  EXPECT_EQ(proto.table_bytes(), 8 * stack.bytes_per_partition());
  EXPECT_EQ(proto.fingerprint(), plan->fingerprint);
}

// Two models that share a table must give each shard the same local rows. Would catch a place that
// depends on the other tables of the model, on their order or on the rules.
TEST(PlanTest, ASharedTableLiesAtTheSamePlacesInEveryModel) {
  const auto place = [](v1::PlanRules rules, const std::vector<std::string>& tables) {
    v1::ModelConfig model;
    for (const std::string& name : tables) {
      AddTable(&model, name, name == "shared" ? 100 : 70, 6, 32);
      if (name != "shared") continue;
      model.mutable_tables(model.tables_size() - 1)->mutable_resource()->set_name("r");
    }
    model.set_enable_variable_deduplication(true);
    model.mutable_plan()->set_rules(rules);
    const auto plan = MakePlan(model, {2, 2});
    EXPECT_TRUE(plan.ok()) << plan.status();
    const auto at = std::find(tables.begin(), tables.end(), "shared") - tables.begin();
    const StackPlan& stack = plan->stacks[plan->table_at[at].stack];
    EXPECT_EQ(stack.tables.size(), 1);
    EXPECT_EQ(plan->stacks.size(), tables.size() > 1 ? 2 : 1);  // the others stay together
    return std::make_tuple(stack.name, stack.embedding_dim, stack.rows_per_partition,
                           stack.tables[0].row_offset, stack.tables[0].shard_rotation);
  };
  const auto alone = place(v1::JAX, {"shared"});
  EXPECT_EQ(alone, std::make_tuple("shared", 8, 32, 0, 0));
  for (const v1::PlanRules rules : {v1::JAX, v1::TENSORFLOW}) {
    EXPECT_EQ(place(rules, {"shared"}), alone);
    EXPECT_EQ(place(rules, {"a", "b", "shared"}), alone);
    EXPECT_EQ(place(rules, {"shared", "z", "a"}), alone);
  }
}

// Two names for one variable: one table in memory, which all features look up, each as its own
// table says.
TEST(PlanTest, TablesOfOneResourceAreOneStoredTable) {
  v1::ModelConfig model;
  for (const std::string name : {"a", "u", "v", "w"}) AddTable(&model, name, 100, 6, 32);
  for (const int shared : {1, 3}) model.mutable_tables(shared)->mutable_resource()->set_name("r");
  model.set_enable_variable_deduplication(true);
  model.mutable_tables(1)->set_combiner(v1::MEAN);
  model.mutable_tables(3)->set_combiner(v1::SQRTN);
  model.mutable_tables(1)->set_max_ids_per_partition(64);
  model.mutable_tables(3)->set_max_ids_per_partition(16);
  for (const v1::PlanRules rules : {v1::JAX, v1::TENSORFLOW}) {
    model.mutable_plan()->set_rules(rules);
    const auto plan = MakePlan(model, {2, 2});
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(plan->stacks.size(), 2);  // and that of a and v
    const Plan::FeatureLocation at = plan->table_at[3];
    EXPECT_EQ(at.stack, plan->table_at[1].stack);
    EXPECT_EQ(at.position, 0);
    EXPECT_NE(at.stack, plan->table_at[2].stack);
    const StackPlan& stack = plan->stacks[at.stack];
    EXPECT_EQ(stack.name, "u");
    ASSERT_EQ(stack.tables.size(), 1);
    EXPECT_EQ(stack.tables[0].table, 1);
    EXPECT_EQ(stack.rows_per_partition, 32);
    EXPECT_EQ(stack.limits.ids, 16);
    EXPECT_EQ(stack.samples, 64);
    ASSERT_EQ(stack.features.size(), 2);
    for (const FeaturePlan& feature : stack.features) {
      const std::string& table = model.features(feature.feature).table();
      EXPECT_EQ(feature.table_in_stack, 0);
      EXPECT_EQ(feature.combiner, table == "u" ? v1::MEAN : v1::SQRTN) << table;
    }
  }
}

// Would catch: time that grows with the cube of their number, for which this would take an hour.
TEST(PlanTest, ThousandsOfTablesWithResourcesArePlanned) {
  constexpr int kTables = 4000;
  v1::ModelConfig model;
  for (int t = 0; t < kTables; ++t) {
    AddTable(&model, absl::StrCat("t", t), 8, 4, 1);
    model.mutable_tables(t)->mutable_resource()->set_name(absl::StrCat("r", t / 2));
  }
  model.set_enable_variable_deduplication(true);
  const auto plan = MakePlan(model, {1, 1});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->stacks.size(), kTables / 2);
  EXPECT_EQ(plan->stacks.back().features.size(), 2);
}

// Would catch: a fingerprint that depends on the process, or a changed plan that keeps it.
TEST(PlanTest, FingerprintIsFrozen) {
  v1::ModelConfig model;
  AddTable(&model, "a", 100, 6, 32);
  AddTable(&model, "b", 50, 5, 16);
  const auto plan = MakePlan(model, {2, 4});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->fingerprint, 1278571995252778237u);
  model.mutable_plan()->set_rotation(4);
  EXPECT_NE(MakePlan(model, {2, 4})->fingerprint, plan->fingerprint);
}

}  // namespace plan_test
}  // namespace emberd::preprocess
