#include "server/checkpoint/testing/tables.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "preprocess/plan/plan.h"
#include "server/checkpoint/partition_file.h"
#include "server/files/files.h"
#include "shard/store/initializer.h"
#include "shard/store/stack_store.h"

namespace emberd::checkpoint {
namespace {

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::cerr << value.status() << std::endl;
  std::abort();
}

// As the storage type keeps them.
void Round(v1::DataType dtype, absl::Span<float> values) {
  std::vector<char> stored(values.size() * sizeof(float));
  shard::WriteStoredRow(dtype, values, stored.data());
  shard::ReadStoredRow(dtype, stored.data(), values);
}

}  // namespace

v1::ModelConfig RandomTables(std::mt19937_64& random) {
  const auto any = [&](const std::vector<std::string>& texts) {
    return texts[random() % texts.size()];
  };
  std::string text = absl::StrCat("name: \"m\" seed: ", random() % 1000);
  const std::string optimizer = any({"sgd {}", "adagrad { initial_accumulator: 0.5 }", "adam {}",
                                     "rowwise_adagrad { initial_accumulator: 0.25 }"});
  for (uint64_t i = 0, n = 1 + random() % 4; i < n; ++i) {
    absl::StrAppend(&text, " tables { name: \"t", i, "\" vocabulary_size: ", 1 + random() % 700,
                    " embedding_dim: ", any({"1", "4", "8", "13"}),
                    " storage_dtype: ", any({"FLOAT32", "BFLOAT16", "FLOAT16"}), " optimizer { ",
                    optimizer, " } initializer { ",
                    any({"zeros {}", "row_id {}", "uniform { lower: -1 upper: 1 }", "normal {}"}),
                    " } } features { name: \"f", i, "\" table: \"t", i, "\" }");
  }
  return OrDie(config::ParseModel(text));
}

TestTables::TestTables(const v1::ModelConfig& config, int partitions) : config_(config) {
  const preprocess::Plan plan =
      OrDie(preprocess::MakePlan(config, {.shards = 1, .sparsecores_per_shard = partitions}));
  plan_ = preprocess::PlanToProto(config, plan);
  for (const v1::TableConfig& table : config.tables()) {
    Array weights{table.name(), "", table.vocabulary_size(), table.embedding_dim()};
    weights.values.resize(weights.rows * weights.columns);
    const shard::Initializer initializer(config.seed(), table.name(), table.initializer());
    for (int64_t id = 0; id < weights.rows; ++id) {
      const auto row =
          absl::MakeSpan(weights.values).subspan(id * weights.columns, weights.columns);
      initializer.Fill(id, row);
      Round(table.storage_dtype(), row);
    }
    arrays_.push_back(std::move(weights));
    for (const config::SlotInfo& info : config::OptimizerSlots(table.optimizer())) {
      Array slot{table.name(), info.name, table.vocabulary_size(),
                 info.one_per_row ? 1 : table.embedding_dim()};
      slot.values.assign(slot.rows * slot.columns, info.initial_value);
      arrays_.push_back(std::move(slot));
    }
  }
}

void TestTables::Change(std::mt19937_64& random) {
  for (const v1::TableConfig& table : config_.tables()) {
    const uint64_t one_of = 1 + random() % 20;
    for (int64_t id = 0; id < table.vocabulary_size(); ++id) {
      if (random() % one_of != 0) continue;
      touched_[{table.name(), id}] = changed_[{table.name(), id}] = true;
      for (Array& array : arrays_) {
        if (array.table != table.name()) continue;
        const auto row = absl::MakeSpan(array.values).subspan(id * array.columns, array.columns);
        for (float& value : row)
          value = static_cast<float>(static_cast<int64_t>(random() % 2000) - 1000) / 7;
        if (array.slot.empty()) Round(table.storage_dtype(), row);
      }
    }
  }
}

const TestTables::Array& TestTables::Find(const std::string& table,
                                          const std::string& array) const {
  return *std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& a) {
    return a.table == table && a.slot == (array == kWeightsArray ? "" : array);
  });
}

absl::Status TestTables::SaveArray(const std::string& folder, const v1::StackPlan& stack,
                                   const std::string& array, const std::map<RowName, bool>& rows,
                                   v1::CheckpointManifest* manifest) {
  using Placed = std::map<int64_t, RowName>;  // by local row
  std::vector<Placed> partitions(plan_.partitions());
  for (const v1::TablePlan& table : stack.tables()) {
    const preprocess::RowPlacement placement = {plan_.partitions(), table.shard_rotation(),
                                                table.row_offset()};
    for (const auto& [row, unused] : rows) {
      if (row.table != table.name()) continue;
      partitions[placement.Partition(row.id)][placement.LocalRow(row.id)] = row;
    }
  }
  for (int p = 0; p < plan_.partitions(); ++p) {
    ASSIGN_OR_RETURN(const PartitionArray what,
                     FindPartitionArray(*manifest, stack.name(), array, p));
    ASSIGN_OR_RETURN(const auto writer, PartitionFileWriter::Create(folder, what));
    for (const auto& [local, row] : partitions[p]) {
      const Array& from = Find(row.table, array);
      std::vector<float> values(what.columns);
      std::copy_n(from.values.begin() + row.id * from.columns, from.columns, values.begin());
      std::vector<char> stored(what.row_bytes());
      shard::WriteStoredRow(what.dtype, values, stored.data());
      RETURN_IF_ERROR(writer->Append(local, stored));
    }
    ASSIGN_OR_RETURN(*manifest->add_files(), writer->Finish());
  }
  return absl::OkStatus();
}

absl::Status TestTables::Save(const CheckpointStore& store, const std::string& name,
                              const std::string& parent) {
  v1::CheckpointManifest manifest;
  manifest.set_format_version(kManifestVersion);
  manifest.set_model(config_.name());
  manifest.set_name(name);
  std::random_device random;
  manifest.set_checkpoint_id(uint64_t{random()} << 32 | random());
  manifest.set_saved_at_ms(++clock_);
  *manifest.mutable_config() = config_;
  *manifest.mutable_plan() = plan_;
  if (!parent.empty()) {
    ASSIGN_OR_RETURN(const v1::CheckpointManifest before, store.Read(config_.name(), parent));
    manifest.set_parent(parent);
    manifest.set_parent_id(before.checkpoint_id());
    manifest.set_chain(before.chain() + 1);
  }
  ASSIGN_OR_RETURN(const std::string folder, store.BeginSave(config_.name(), name));
  for (const v1::StackPlan& stack : plan_.stacks()) {
    std::vector<std::string> names = {kWeightsArray};
    names.insert(names.end(), stack.slots().begin(), stack.slots().end());
    for (const std::string& array : names) {
      RETURN_IF_ERROR(
          SaveArray(folder, stack, array, parent.empty() ? touched_ : changed_, &manifest));
    }
  }
  ASSIGN_OR_RETURN(*manifest.add_states(),
                   files::WriteListedFile(folder, "state.s0000.pb", std::string(100, 's')));
  RETURN_IF_ERROR(store.Commit(folder, &manifest));
  changed_.clear();
  return absl::OkStatus();
}

}  // namespace emberd::checkpoint
