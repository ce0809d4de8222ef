// Would catch any deviation from TensorFlow's SparseCore layout: cuts, stacking, offsets, rotation,
// row placement and sample placement.
//
// Left out: 05 (cutting padding off: reading of rows, not preprocessing); of 03 the attributes that
// only repeat their input; of 06 what golden_checkpoint_test.cc does with files, and the keys of
// the checkpoint reader; of 08 the lookups themselves (the shard's matter), initial values too; of
// 12 nothing; of 15 the memory estimates and the COO example (preprocessor_test covers merging).
#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/sort_and_merge.h"
#include "preprocess/plan/plan.h"
#include "preprocess/testing/numberings.h"

namespace emberd::preprocess {
namespace golden_tf_layout_test {

using nlohmann::json;
using Rows = std::vector<std::vector<double>>;

json Load(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/tf/" + name + ".json"));
  return json::parse(file);
}

json Cases(const std::string& name) {
  json cases = Load(name).at("cases");
  EXPECT_FALSE(cases.empty()) << name;
  return cases;
}

TEST(GoldenTfLayoutTest, SplitMasksAndBoundaries) {
  for (const json& c : Cases("01_bucket_splits")) {
    CutSet cuts = 0;
    for (int bucket : c.at("buckets")) cuts |= CutSet{1} << bucket;
    EXPECT_EQ(TensorFlowMask(cuts), c.at("binary").get<uint64_t>()) << c.at("name");
  }
}

StackingLimits LimitsOf(const json& config, int64_t shards) {
  StackingLimits limits;
  limits.shards = shards;
  limits.activation_bytes = config.value("activation_mem_bytes_limit", limits.activation_bytes);
  limits.shard_bytes = config.value("variable_shard_bytes_limit", limits.shard_bytes);
  limits.rows = config.value("row_limit", limits.rows);
  limits.tables = config.value("table_limit", limits.tables);
  if (!config.value("stacking_enabled", true)) limits.tables = 1;
  return limits;
}

TEST(GoldenTfLayoutTest, Stacker) {
  for (const json& c : Cases("02_layout_stacker")) {
    SCOPED_TRACE(c.at("name"));
    const int64_t chips = c.at("num_partitions");
    const int64_t per_chip = c.at("sparse_cores_per_partition");
    std::vector<StackCandidate> tables;
    for (const json& t : c.at("tables")) {
      tables.push_back({t.at("name"), t.at("group"), PaddedWidth(t.at("width")),
                        PaddedRows(t.at("height"), chips * per_chip),
                        t.at("output_samples").get<int64_t>() / per_chip});
    }
    std::map<std::string, json> records;
    for (const auto& stack : StackLikeTensorFlow(tables, LimitsOf(c.at("config"), chips))) {
      std::vector<std::string> names;
      for (int t : stack) names.push_back(tables[t].name);
      int64_t rows = 0;
      for (size_t k = 0; k < stack.size(); ++k) {
        const StackCandidate& table = tables[stack[k]];
        records[table.name] = {{"stacked_table_name", StackName(names, /*shorten=*/false)},
                               {"unsharded_padded_shape", {table.padded_rows, table.width}},
                               {"sparse_core_shard_row_offset", rows},
                               {"sparse_core_shard_rotation", k * per_chip % (chips * per_chip)}};
        rows += table.padded_rows / (chips * per_chip);
      }
      for (int t : stack) records[tables[t].name]["total_rows_per_sparse_core_shard"] = rows;
    }
    for (const json& expected : c.at("expected")) {
      for (const auto& [key, value] : records.at(expected.at("table_name")).items()) {
        if (!expected.contains(key)) continue;
        EXPECT_EQ(value, expected.at(key)) << key;
      }
    }
  }
}

// The model of a case of the stacker, its tables from last to first: nothing but the rules and the
// case's limits is set.
v1::ModelConfig ModelOf(const json& c) {
  v1::ModelConfig model;
  v1::PlanConfig* plan = model.mutable_plan();
  const json& config = c.at("config");
  plan->set_rules(v1::TENSORFLOW);
  plan->set_auto_stack(config.value("stacking_enabled", true));
  if (config.contains("activation_mem_bytes_limit")) {
    plan->set_activation_bytes_limit(config.at("activation_mem_bytes_limit"));
  }
  if (config.contains("variable_shard_bytes_limit")) {
    plan->set_shard_bytes_limit(config.at("variable_shard_bytes_limit"));
  }
  const json& tables = c.at("tables");
  for (auto t = tables.rbegin(); t != tables.rend(); ++t) {
    v1::TableConfig* table = model.add_tables();
    table->set_name(t->at("name"));
    table->set_vocabulary_size(t->at("height"));
    table->set_embedding_dim(t->at("width"));
    v1::FeatureConfig* feature = model.add_features();
    feature->set_name(absl::StrCat("f_", table->name()));
    feature->set_table(table->name());
    feature->set_batch_size(t->at("output_samples"));
  }
  return model;
}

// The whole way from a config.
TEST(GoldenTfLayoutTest, PlanGivesTheStackersRecords) {
  int planned = 0;
  for (const json& c : Cases("02_layout_stacker")) {
    if (c.at("config").contains("table_limit")) continue;  // a plan has no such limit
    SCOPED_TRACE(c.at("name"));
    ++planned;
    const auto plan =
        MakePlan(ModelOf(c), {c.at("num_partitions"), c.at("sparse_cores_per_partition")});
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::map<std::string, json> records;
    for (const StackPlan& stack : plan->stacks) {
      for (const TablePlan& table : stack.tables) {
        records[table.name] = {
            {"stacked_table_name", stack.name},
            {"unsharded_padded_shape", {table.padded_vocabulary_size, stack.embedding_dim}},
            {"sparse_core_shard_row_offset", table.row_offset},
            {"sparse_core_shard_rotation", table.shard_rotation},
            {"total_rows_per_sparse_core_shard", stack.rows_per_partition}};
      }
    }
    for (const json& expected : c.at("expected")) {
      for (const auto& [key, value] : records.at(expected.at("table_name")).items()) {
        if (!expected.contains(key)) continue;
        EXPECT_EQ(value, expected.at(key)) << key;
      }
    }
  }
  EXPECT_EQ(planned, 5);
}

TEST(GoldenTfLayoutTest, SamplesAndRowsOfOneSparseCore) {
  for (const json& c : Cases("03_frontend_attributes")) {
    const json& in = c.at("input");
    std::vector<SlotLayout> layout;
    const std::vector<int64_t> samples = {in.at("input_size")};
    LayOutSamples(v1::STACK_THEN_SPLIT, samples, in.at("num_sparsecores_per_device"), &layout);
    for (const SlotLayout& slot : layout) {
      EXPECT_EQ(std::to_string(slot.samples),
                c.at("expected").at("_xla_sample_count").get<std::string>());
    }
    const RowPlacement last = {in.at("num_sparsecores_per_device"), 0, 0};
    EXPECT_EQ(std::to_string(last.LocalRow(in.at("vocab_size").get<int64_t>() - 1) + 1),
              c.at("expected").at("_xla_vocab_size").get<std::string>());
  }
}

TEST(GoldenTfLayoutTest, LogicalRowsAreFoundInShardedTables) {
  for (const json& c : Cases("04_unshuffle")) {
    SCOPED_TRACE(c.at("name"));
    const bool columns = c.contains("stacked_input_first_column");
    const json& stored = c.at(columns ? "stacked_input_first_column" : "stacked_input");
    const json& expected = c.at(columns ? "expected_first_column" : "expected");
    const int64_t cores = c.at("num_sparse_cores");
    const RowPlacement table = {cores, c.at("shard_rotation"), c.at("offset_in_shard")};
    const int64_t stack_rows = static_cast<int64_t>(stored.size()) / cores;
    for (size_t row = 0; row < expected.size(); ++row) {
      EXPECT_EQ(stored.at(PhysicalRow(table, static_cast<int64_t>(row), stack_rows)),
                expected[row]);
    }
  }
}

RowPlacement PlacementOf(const json& layout) {
  const int64_t cores = layout.at("num_sparse_cores");
  return {cores, layout.at("sparse_core_shard_rotation").get<int64_t>() % cores,
          layout.at("sparse_core_shard_row_offset")};
}

Rows WithWidth(Rows rows, size_t width) {
  for (auto& row : rows) row.resize(width);
  return rows;
}

// Logical tables out of stacks that `layouts` describe.
std::map<std::string, Rows> Unstack(const json& layouts,
                                    const std::map<std::string, Rows>& stacks) {
  std::map<std::string, Rows> tables;
  for (const json& layout : layouts) {
    const RowPlacement placement = PlacementOf(layout);
    const Rows& stack = stacks.at(layout.at("stacked_table_name"));
    Rows& table = tables[layout.at("table_name")];
    for (int64_t id = 0; id < layout.at("unsharded_shape").at(0); ++id) {
      const int64_t rows = layout.at("total_rows_per_sparse_core_shard");
      table.push_back(stack.at(PhysicalRow(placement, id, rows)));
      table.back().resize(layout.at("unsharded_shape").at(1).get<size_t>());
    }
  }
  return tables;
}

// The stack `name` of `layouts`, whole.
Rows Restack(const json& layouts, const std::string& name,
             const std::map<std::string, Rows>& tables) {
  Rows stack;
  for (const json& layout : layouts) {
    if (layout.at("stacked_table_name") != name) continue;
    const int64_t rows = layout.at("total_rows_per_sparse_core_shard");
    const size_t width = layout.at("unsharded_padded_shape").at(1);
    stack.resize(layout.at("num_sparse_cores").get<int64_t>() * rows, std::vector<double>(width));
    const Rows table = WithWidth(tables.at(layout.at("table_name")), width);
    for (size_t id = 0; id < table.size(); ++id) {
      stack.at(PhysicalRow(PlacementOf(layout), static_cast<int64_t>(id), rows)) = table[id];
    }
  }
  return stack;
}

Rows Part(const Rows& rows, int64_t first, size_t count) {
  return Rows(rows.begin() + first, rows.begin() + first + static_cast<int64_t>(count));
}

TEST(GoldenTfLayoutTest, TablesMoveBetweenLayouts) {
  for (const json& c : Cases("06_checkpoint_reshard")) {
    if (!c.contains("to_layouts")) continue;
    SCOPED_TRACE(c.at("name"));
    const json& to = c.at("to_layouts");
    std::map<std::string, Rows> tables, stacks;
    if (c.contains("unsharded_tables")) c.at("unsharded_tables").get_to(tables);
    if (c.contains("stacked_inputs")) c.at("stacked_inputs").get_to(stacks);
    if (c.contains("stacked_input")) {
      stacks[c.at("from_layouts").at(0).at("stacked_table_name")] =
          c.at("stacked_input").get<Rows>();
    }
    if (!stacks.empty()) tables = Unstack(c.at("from_layouts"), stacks);
    if (c.contains("slices")) {
      for (const json& slice : c.at("slices")) {
        // "rows cols first,count:0,cols"
        int64_t all = 0, columns = 0, first = 0;
        std::sscanf(slice.at("slice_spec").get<std::string>().c_str(), "%ld %ld %ld,", &all,
                    &columns, &first);
        const auto expected = slice.at("expected").get<Rows>();
        EXPECT_EQ(Part(Restack(to, slice.at("stack"), tables), first, expected.size()), expected);
      }
      continue;
    }
    const auto expected = c.at("expected").get<Rows>();
    const int64_t first = c.at("first_shard").get<int64_t>() *
                          to.at(0).at("total_rows_per_sparse_core_shard").get<int64_t>();
    EXPECT_EQ(Part(Restack(to, to.at(0).at("stacked_table_name"), tables), first, expected.size()),
              expected);
  }
}

TEST(GoldenTfLayoutTest, StackNamesAndPaddingOfLookups) {
  for (const json& c : Cases("08_initializers_and_lookup")) {
    if (c.contains("expected_stack_name")) {
      std::vector<std::string> names;
      for (const json& table : c.at("tables")) names.push_back(table.at("name"));
      std::sort(names.begin(), names.end());
      EXPECT_EQ(StackName(names, false), c.at("expected_stack_name").get<std::string>());
    }
    if (c.at("name") == "unsharded_to_tpu_restore_rule") {
      const int64_t rows = PaddedRows(c.at("table").at("vocabulary_size"), 8);
      EXPECT_EQ(rows % 64, 0);
      EXPECT_EQ(rows, 64);
      EXPECT_EQ(PaddedWidth(c.at("table").at("dim")), 8);
    }
  }
}

TEST(GoldenTfLayoutTest, SamplesAndIdsOfAStack) {
  for (const json& c : Cases("12_row_col_transform")) {
    const int64_t samples = c.at("sample_count");
    const int64_t before = c.at("row_offset");
    const int64_t all = c.at("stacked_table_sample_count");
    std::vector<SlotLayout> layout;
    const std::vector<int64_t> counts = {before, samples, all - before - samples};
    LayOutSamples(v1::SPLIT_THEN_STACK, counts, c.at("num_sc_per_chip"), &layout);
    const int64_t cores = c.at("num_sc_shards");
    const RowPlacement placement = {cores, c.at("col_shift").get<int64_t>() % cores, 0};
    for (const json& point : c.at("points")) {
      const int64_t row = point.at("row");
      int64_t found = -1;
      for (size_t s = 0; s < layout.size(); ++s) {
        for (const SlotSlice& slice : layout[s].slices) {
          const int64_t offset = row - slice.sample_begin;
          if (slice.feature != 1 || offset < 0 || offset >= slice.count) continue;
          found = static_cast<int64_t>(s) * layout[s].samples + slice.slot_begin + offset;
        }
      }
      EXPECT_EQ(found, point.at("expected_row").get<int64_t>());
      // TensorFlow adds any offset at the end, also one that no table can have.
      EXPECT_EQ(StackedId(placement, point.at("col")) + c.at("col_offset").get<int64_t>(),
                point.at("expected_col").get<int64_t>());
    }
  }
}

TEST(GoldenTfLayoutTest, RowToPartition) {
  for (const json& c : Cases("15_docs_examples")) {
    if (!c.contains("derived_points")) continue;
    for (const json& point : c.at("derived_points")) {
      const json& layout = point.at("layout");
      const int64_t cores = layout.at("num_sparse_cores");
      const int64_t per_chip = cores / layout.at("num_partitions").get<int64_t>();
      const RowPlacement table = {cores, layout.at("rotation"), layout.at("row_offset")};
      const int64_t row = point.at("row");
      const int64_t core = table.Partition(row);
      EXPECT_EQ(core, point.at("sparse_core_shard").get<int64_t>());
      EXPECT_EQ(core / per_chip, point.at("partition").get<int64_t>());
      EXPECT_EQ(table.LocalRow(row), point.at("row_within_sparse_core_shard").get<int64_t>());
      const int64_t stack_rows = layout.at("total_rows_per_sparse_core_shard");
      EXPECT_EQ(core % per_chip * stack_rows + table.LocalRow(row),
                point.at("row_within_partition").get<int64_t>());
      EXPECT_EQ(TableRow(table, core, table.LocalRow(row)), row);
    }
  }
}

}  // namespace golden_tf_layout_test
}  // namespace emberd::preprocess
