// TensorFlow's checkpoints of sharded tables (06, 07), by way of emberd's own files: its stacks are
// saved slice by slice, read back as tables, and saved again under the layout that they are to
// have. Would catch any deviation in which row of which partition holds which id, in how a slice is
// described, and in what is refused.
//
// Left out: of 06 the keys of TensorFlow's own reader.
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/crc32c.h"
#include "base/safetensors.h"
#include "base/temp_dir.h"
#include "base/testing/paths.h"
#include "config/config.h"
#include "preprocess/plan/plan.h"
#include "preprocess/testing/numberings.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/partition_file.h"
#include "server/checkpoint/store.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace golden_checkpoint_test {

using nlohmann::json;
using testing::HasSubstr;
using Rows = std::vector<std::vector<float>>;

json Cases(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/tf/" + name + ".json"));
  json cases = json::parse(file).at("cases");
  EXPECT_FALSE(cases.empty()) << name;
  return cases;
}

// A checkpoint without files, of tables that lie as TensorFlow's layout records say.
v1::CheckpointManifest ManifestOf(const json& layouts, const std::string& name) {
  v1::CheckpointManifest manifest;
  manifest.set_format_version(kManifestVersion);
  manifest.set_model("m");
  manifest.set_name(name);
  v1::ModelPlan& plan = *manifest.mutable_plan();
  std::map<std::string, v1::StackPlan*> stacks;
  for (const json& layout : layouts) {
    const int cores = layout.at("num_sparse_cores");
    plan.set_partitions(cores);
    v1::TableConfig& config = *manifest.mutable_config()->add_tables();
    config.set_name(layout.at("table_name"));
    config.set_vocabulary_size(layout.at("unsharded_shape").at(0));
    config.set_embedding_dim(layout.at("unsharded_shape").at(1));
    config.set_storage_dtype(v1::FLOAT32);
    config.mutable_optimizer()->mutable_sgd();
    config.mutable_initializer()->mutable_zeros();
    v1::StackPlan*& stack = stacks[layout.at("stacked_table_name")];
    if (stack == nullptr) stack = plan.add_stacks();
    stack->set_name(layout.at("stacked_table_name"));
    stack->set_embedding_dim(layout.at("unsharded_padded_shape").at(1));
    stack->set_rows_per_partition(layout.at("total_rows_per_sparse_core_shard"));
    stack->set_vocabulary_size(stack->rows_per_partition() * cores);
    v1::TablePlan& table = *stack->add_tables();
    table.set_name(config.name());
    table.set_vocabulary_size(config.vocabulary_size());
    table.set_padded_vocabulary_size(layout.at("unsharded_padded_shape").at(0));
    table.set_embedding_dim(config.embedding_dim());
    table.set_row_offset(layout.at("sparse_core_shard_row_offset"));
    table.set_shard_rotation(layout.at("sparse_core_shard_rotation").get<int>() % cores);
  }
  return manifest;
}

class GoldenCheckpointTest : public testing::Test {
 protected:
  // Rows of each stack, partition after partition.
  CheckpointChain Save(v1::CheckpointManifest manifest, const std::map<std::string, Rows>& stacks) {
    const std::string folder = *store_.BeginSave("m", manifest.name());
    for (const v1::StackPlan& stack : manifest.plan().stacks()) {
      const Rows& rows = stacks.at(stack.name());
      EXPECT_EQ(static_cast<int64_t>(rows.size()), stack.vocabulary_size());
      for (int p = 0; p < manifest.plan().partitions(); ++p) {
        const PartitionArray array = *FindPartitionArray(manifest, stack.name(), kWeightsArray, p);
        auto writer = *PartitionFileWriter::Create(folder, array);
        for (int64_t r = 0; r < array.rows_per_partition; ++r) {
          const std::vector<float>& row = rows.at(p * array.rows_per_partition + r);
          EXPECT_EQ(static_cast<int>(row.size()), array.columns);
          EXPECT_TRUE(writer
                          ->Append(r, absl::MakeConstSpan(reinterpret_cast<const char*>(row.data()),
                                                          row.size() * 4))
                          .ok());
        }
        *manifest.add_files() = *writer->Finish();
      }
    }
    const absl::Status status = store_.Commit(folder, &manifest);
    EXPECT_TRUE(status.ok()) << status;
    return *store_.Chain("m", manifest.name());
  }

  // The tables of a checkpoint under another layout: partition by partition, as a shard restores.
  static std::map<std::string, Rows> Restack(const CheckpointChain& from,
                                             const v1::CheckpointManifest& to) {
    const int partitions = to.plan().partitions();
    std::map<std::string, Rows> stacks;
    for (const v1::StackPlan& stack : to.plan().stacks()) {
      Rows& rows = stacks[stack.name()];
      rows.assign(stack.vocabulary_size(), std::vector<float>(stack.embedding_dim()));
      for (const v1::TablePlan& table : stack.tables()) {
        const preprocess::RowPlacement placement = {partitions, table.shard_rotation(),
                                                    table.row_offset()};
        auto reader = *TableReader::Open(&from, table.name(), "");
        for (int p = 0; p < partitions; ++p) {
          IdRun ids{.first = TableRow(placement, p, table.row_offset()), .stride = partitions};
          if (ids.first >= reader->rows()) continue;
          ids.count = (reader->rows() - 1 - ids.first) / partitions + 1;
          std::vector<float> values(ids.count * reader->columns());
          EXPECT_TRUE(reader->Read(ids, values.data()).ok());
          for (int64_t i = 0; i < ids.count; ++i) {
            std::copy_n(values.begin() + i * reader->columns(), reader->columns(),
                        rows.at(p * stack.rows_per_partition() + table.row_offset() + i).begin());
          }
        }
      }
    }
    return stacks;
  }

  // What a slice "all columns first,rows:0,columns" of a stack is: that of the files whose slices
  // it is made of.
  static absl::StatusOr<Rows> Slice(const CheckpointChain& chain, const std::string& stack,
                                    const std::string& slice_spec) {
    Rows rows;
    int64_t all = 0, columns = 0, first = 0, count = 0;
    std::sscanf(slice_spec.c_str(), "%ld %ld %ld,%ld:", &all, &columns, &first, &count);
    for (const v1::CheckpointFile& file : chain[0].manifest().files()) {
      const PartitionArray array =
          *FindPartitionArray(chain[0].manifest(), stack, kWeightsArray, file.partition());
      const int64_t begin = array.rows_per_partition * array.partition;
      if (file.stack() != stack || begin < first || begin >= first + count) continue;
      EXPECT_EQ(Metadata(files::PathIn(chain[0].folder(), file.path())).at("slice_spec"),
                absl::StrCat(all, " ", columns, " ", begin, ",", array.rows_per_partition, ":0,",
                             columns));
      auto reader = PartitionFileReader::Open(chain[0].folder(), file, array);
      if (!reader.ok()) return reader.status();
      const absl::Status read = (*reader)->Stream([&](int64_t, absl::Span<const char> bytes) {
        const auto* values = reinterpret_cast<const float*>(bytes.data());
        for (size_t i = 0; i < bytes.size() / 4 / columns; ++i) {
          rows.emplace_back(values + i * columns, values + (i + 1) * columns);
        }
        return absl::OkStatus();
      });
      if (!read.ok()) return read;
    }
    return rows;
  }

  static std::map<std::string, std::string> Metadata(const std::string& path) {
    const std::string bytes = *files::ReadFileWhole(path);
    const auto size = static_cast<int64_t>(bytes.size());
    const int64_t header = *SafetensorsHeaderSize(bytes.substr(0, 8), size);
    return ParseSafetensorsHeader(bytes.substr(8, header - 8), size - header)->metadata;
  }

  const TempDir dir_ = *TempDir::Create();
  const CheckpointStore store_{dir_.path()};
};

// One partition that holds the tables one after another, unsharded.
json Unsharded(const json& layouts) {
  json unsharded = layouts;
  for (json& layout : unsharded) {
    layout["stacked_table_name"] = layout.at("table_name");
    layout["num_sparse_cores"] = 1;
    layout["unsharded_padded_shape"] = layout.at("unsharded_shape");
    layout["sparse_core_shard_row_offset"] = 0;
    layout["sparse_core_shard_rotation"] = 0;
    layout["total_rows_per_sparse_core_shard"] = layout.at("unsharded_shape").at(0);
  }
  return unsharded;
}

TEST_F(GoldenCheckpointTest, TablesMoveBetweenLayoutsThroughFiles) {
  int number = 0;
  for (const json& c : Cases("06_checkpoint_reshard")) {
    if (!c.contains("to_layouts")) continue;
    SCOPED_TRACE(c.at("name"));
    const json& to_layouts = c.at("to_layouts");
    const std::string stack = to_layouts.at(0).at("stacked_table_name");
    std::map<std::string, Rows> saved;
    if (c.contains("unsharded_tables")) c.at("unsharded_tables").get_to(saved);
    if (c.contains("stacked_inputs")) c.at("stacked_inputs").get_to(saved);
    if (c.contains("stacked_input")) {
      saved[c.at("from_layouts").at(0).at("stacked_table_name")] =
          c.at("stacked_input").get<Rows>();
    }
    const json from_layouts =
        c.contains("from_layouts") ? c.at("from_layouts") : Unsharded(to_layouts);
    const CheckpointChain from =
        Save(ManifestOf(from_layouts, absl::StrCat("from", ++number)), saved);
    const v1::CheckpointManifest manifest = ManifestOf(to_layouts, absl::StrCat("to", number));
    const CheckpointChain to = Save(manifest, Restack(from, manifest));

    if (c.contains("slices")) {
      for (const json& slice : c.at("slices")) {
        EXPECT_EQ(*Slice(to, slice.at("stack"), slice.at("slice_spec")),
                  slice.at("expected").get<Rows>());
      }
      continue;
    }
    // The slice may begin in the middle of a shard upstream, which then gives the shard that it
    // begins in. Its files are compared from there, and a file that says so is refused (below).
    const int64_t shard_rows = manifest.plan().stacks(0).rows_per_partition();
    const auto expected = c.at("expected").get<Rows>();
    const auto& plan = manifest.plan().stacks(0);
    const std::string spec = absl::StrCat(plan.vocabulary_size(), " ", plan.embedding_dim(), " ",
                                          c.at("first_shard").get<int64_t>() * shard_rows, ",",
                                          expected.size(), ":0,", plan.embedding_dim());
    EXPECT_EQ(*Slice(to, stack, spec), expected);
  }
  EXPECT_EQ(number, 5);
}

// Upstream rounds down to the shard in which a slice begins.
TEST_F(GoldenCheckpointTest, RefusesASliceThatIsNotAlignedWithAShard) {
  const json c = Cases("06_checkpoint_reshard").at(0);
  v1::CheckpointManifest manifest = ManifestOf(c.at("to_layouts"), "a");
  const v1::StackPlan& stack = manifest.plan().stacks(0);
  const PartitionArray array = *FindPartitionArray(manifest, stack.name(), kWeightsArray, 2);
  auto writer = *PartitionFileWriter::Create(dir_.path(), array);
  const std::string row(array.row_bytes(), '\0');
  ASSERT_TRUE(writer->Append(0, absl::MakeConstSpan(row.data(), row.size())).ok());
  v1::CheckpointFile file = *writer->Finish();
  EXPECT_TRUE(PartitionFileReader::Open(dir_.path(), file, array).ok());

  // Another slice, in a header that is as long and has its checksum.
  std::string bytes = *files::ReadFileWhole(dir_.Path(file.path()));
  const std::string good = "24 8 6,3:0,8", bad = c.at("slice_spec").get<std::string>();
  const size_t at = bytes.find(good);
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, good.size(), bad);
  bytes.erase(bytes.find("  ", at), bad.size() - good.size());  // it ends with blanks
  std::ofstream(dir_.Path(file.path()), std::ios::binary) << bytes;
  const size_t header = bytes.size() - row.size() - 8;
  file.set_header_crc32c(ExtendCrc32c(0, absl::MakeConstSpan(bytes.data(), header)));
  EXPECT_THAT(std::string(PartitionFileReader::Open(dir_.path(), file, array).status().message()),
              HasSubstr("its slice_spec is \"128 8 8,12:0,8\", not \"24 8 6,3:0,8\""));
}

TEST_F(GoldenCheckpointTest, LayoutsAreTheSameOrNot) {
  for (const json& c : Cases("06_checkpoint_reshard")) {
    if (!c.contains("expected_same")) continue;
    json layout = c.at("layout");
    const v1::CheckpointManifest manifest = ManifestOf(json::array({layout}), "a");
    EXPECT_EQ(SameLayout(manifest, ManifestOf(json::array({layout}), "b")),
              c.at("expected_same").get<bool>());
    layout.update(c.at("changed_field"));
    EXPECT_EQ(SameLayout(manifest, ManifestOf(json::array({layout}), "b")),
              c.at("expected_same_after_change").get<bool>());
  }
}

// With the texts of the systems that do so, too.
TEST_F(GoldenCheckpointTest, RefusesWhatCannotBeSharded) {
  const json layouts = Cases("06_checkpoint_reshard").at(1).at("to_layouts");
  const v1::CheckpointManifest good = ManifestOf(layouts, "a");
  EXPECT_TRUE(EncodeManifest(good).ok());
  const auto fault = [](const v1::CheckpointManifest& manifest) {
    return std::string(EncodeManifest(manifest).status().message());
  };
  v1::CheckpointManifest bad = good;
  bad.mutable_plan()->mutable_stacks(0)->set_vocabulary_size(55);
  EXPECT_THAT(fault(bad), HasSubstr("Only evenly sharding across devices is supported"));
  bad = good;
  bad.mutable_plan()->mutable_stacks(0)->mutable_tables(0)->set_padded_vocabulary_size(23);
  EXPECT_THAT(fault(bad),
              HasSubstr("first dim of the table should be multiple of number of sparse cores"));

  v1::ModelConfig config = good.config();
  EXPECT_TRUE(CheckSameTables(good, config).ok());
  config.mutable_tables(0)->set_name("other");
  EXPECT_EQ(
      CheckSameTables(good, config).message(),
      "Layouts in checkpoint and embedding must have the same keys: table \"one\" is 20 x 4 in "
      "checkpoint \"a\", and absent in the model");
  config = good.config();
  config.mutable_tables(1)->set_embedding_dim(5);
  EXPECT_THAT(std::string(CheckSameTables(good, config).message()),
              HasSubstr("table \"two\" is 32 x 4 in checkpoint \"a\", and 32 x 5 in the model"));
}

// "arange(100,120) as 10x2, zero padded": rows that follow are zero.
Rows InitialRows(const json& table) {
  int begin = 0, end = 0, rows = 0, columns = 0;
  EXPECT_EQ(std::sscanf(table.at("initial").get<std::string>().c_str(), "arange(%d,%d) as %dx%d",
                        &begin, &end, &rows, &columns),
            4);
  EXPECT_EQ(end - begin, rows * columns);
  Rows values(table.at("vocabulary_size").get<size_t>(), std::vector<float>(columns));
  for (int i = 0; i < rows * columns; ++i)
    values[i / columns][i % columns] = static_cast<float>(begin + i);
  return values;
}

TEST_F(GoldenCheckpointTest, TablesAreServedAsTheyWereTrained) {
  for (const json& c : Cases("07_restore_values")) {
    SCOPED_TRACE(c.at("name"));
    std::string text = "name: \"m\"";
    for (const json& table : c.at("tables")) {
      const std::string name = table.at("name");
      absl::StrAppend(&text, " tables { name: \"", name,
                      "\" vocabulary_size: ", table.at("vocabulary_size").get<int>(),
                      " embedding_dim: ", table.at("dim").get<int>(),
                      " initializer { zeros {} } } features { name: \"f_", name, "\" table: \"",
                      name, "\" }");
    }
    v1::CheckpointManifest manifest;
    manifest.set_format_version(kManifestVersion);
    manifest.set_model("m");
    manifest.set_name(c.at("name"));
    *manifest.mutable_config() = *config::ParseModel(text);
    *manifest.mutable_plan() = preprocess::PlanToProto(
        manifest.config(),
        *preprocess::MakePlan(manifest.config(), {.shards = 2, .sparsecores_per_shard = 4}));
    EXPECT_EQ(manifest.plan().stacks_size(), c.at("expected_num_stacks").get<int>());
    if (!c.contains("lookups")) continue;

    std::map<std::string, Rows> stacks;
    for (const v1::StackPlan& stack : manifest.plan().stacks()) {
      Rows& rows = stacks[stack.name()];
      rows.assign(stack.vocabulary_size(), std::vector<float>(stack.embedding_dim()));
      for (const v1::TablePlan& plan : stack.tables()) {
        const preprocess::RowPlacement placement = {8, plan.shard_rotation(), plan.row_offset()};
        for (const json& table : c.at("tables")) {
          if (table.at("name") != plan.name()) continue;
          const Rows values = InitialRows(table);
          for (size_t id = 0; id < values.size(); ++id) {
            auto& row = rows.at(
                PhysicalRow(placement, static_cast<int64_t>(id), stack.rows_per_partition()));
            std::copy(values[id].begin(), values[id].end(), row.begin());
          }
        }
      }
    }
    const CheckpointChain chain = Save(manifest, stacks);
    for (const json& lookup : c.at("lookups")) {
      auto reader = *TableReader::Open(&chain, lookup.at("table"), "");
      std::vector<float> row(reader->columns());
      ASSERT_TRUE(reader->Read({.first = lookup.at("id"), .count = 1}, row.data()).ok());
      EXPECT_EQ(row, lookup.at("expected").get<std::vector<float>>());
    }
  }
}

}  // namespace golden_checkpoint_test
}  // namespace emberd::checkpoint
