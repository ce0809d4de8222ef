#include "server/checkpoint/table_reader.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "config/shared_tables.h"
#include "shard/store/stack_store.h"

namespace emberd::checkpoint {
namespace {

// A process may have 1,024 open files where nobody has raised the limit, and each takes a window
// of 1 MiB.
constexpr size_t kMostOpenFiles = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<TableReader>> TableReader::Open(const CheckpointChain* chain,
                                                               const std::string& table,
                                                               const std::string& slot,
                                                               bool verify) {
  std::unique_ptr<TableReader> reader(new TableReader(chain, verify));
  RETURN_IF_ERROR(reader->FindTable(table, slot));
  return reader;
}

absl::Status TableReader::FindTable(const std::string& table, const std::string& slot) {
  const v1::CheckpointManifest& manifest = chain_->front().manifest();
  const auto& tables = manifest.config().tables();
  const auto config = std::find_if(tables.begin(), tables.end(),
                                   [&](const v1::TableConfig& t) { return t.name() == table; });
  const std::string& stored = config::StoredName(manifest.config(), table);
  for (const v1::StackPlan& stack : manifest.plan().stacks()) {
    for (const v1::TablePlan& plan : stack.tables()) {
      if (plan.name() != stored || config == tables.end()) continue;
      stack_ = stack.name();
      vocabulary_size_ = plan.vocabulary_size();
      placement_ = {manifest.plan().partitions(), plan.shard_rotation(), plan.row_offset()};
      columns_ = plan.embedding_dim();
      dtype_ = config->storage_dtype();
      if (!slot.empty()) return FindSlot(*config, slot);
      array_ = kWeightsArray;
      initializer_.emplace(manifest.config().seed(), config::SeedName(manifest.config(), *config),
                           config->initializer());
      return absl::OkStatus();
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "checkpoint \"", manifest.name(), "\" of model \"", manifest.model(), "\" has no table \"",
      table, "\"; ", KnownNames("tables", table, config::TableNames(manifest.config()))));
}

absl::Status TableReader::FindSlot(const v1::TableConfig& table, const std::string& slot) {
  std::vector<std::string> names;
  for (const config::SlotInfo& info : config::OptimizerSlots(table.optimizer())) {
    names.push_back(info.name);
    if (info.name != slot) continue;
    array_ = slot;
    dtype_ = v1::FLOAT32;
    initial_value_ = info.initial_value;
    if (info.one_per_row) columns_ = 1;
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat(
      "table \"", table.name(), "\" has no slot \"", slot, "\"; ",
      names.empty() ? std::string("its optimizer keeps none") : KnownNames("slots", slot, names)));
}

absl::StatusOr<PartitionChain*> TableReader::PartitionOf(int64_t id) {
  const auto partition = static_cast<int>(placement_.Partition(id));
  const auto found = open_.find(partition);
  if (found != open_.end()) return &found->second;
  if ((open_.size() + 1) * chain_->size() > kMostOpenFiles) open_.clear();
  ASSIGN_OR_RETURN(PartitionChain opened, PartitionChain::Open(*chain_, stack_, array_, partition));
  if (verify_ && verified_.insert(partition).second) {
    RETURN_IF_ERROR(opened.Verify([](int64_t) { return absl::OkStatus(); }));
  }
  return &open_.emplace(partition, std::move(opened)).first->second;
}

void TableReader::InitialRow(int64_t id, float* values) const {
  const auto row = absl::MakeSpan(values, columns_);
  if (!initializer_.has_value()) {
    std::fill(row.begin(), row.end(), initial_value_);
    return;
  }
  initializer_->Fill(id, row);
  if (dtype_ == v1::FLOAT32) return;
  // What a store would keep of them.
  std::vector<char> stored(row.size() * sizeof(float));
  shard::WriteStoredRow(dtype_, row, stored.data());
  shard::ReadStoredRow(dtype_, stored.data(), row);
}

absl::Status TableReader::Read(const IdRun& ids, float* values) {
  std::vector<bool> held;
  RETURN_IF_ERROR(ReadHeld(ids, values, &held));
  for (int64_t i = 0; i < ids.count; ++i) {
    if (!held[i]) InitialRow(ids.first + i * ids.stride, values + i * columns_);
  }
  return absl::OkStatus();
}

absl::Status TableReader::ReadHeld(const IdRun& ids, float* values, std::vector<bool>* held) {
  if (ids.first < 0 || ids.count < 0 || ids.stride < 1 ||
      (ids.count > 0 &&
       (ids.first >= rows() || ids.count - 1 > (rows() - 1 - ids.first) / ids.stride))) {
    return absl::OutOfRangeError(absl::StrCat(ids.count, " ids from ", ids.first, " by ",
                                              ids.stride, " are not in [0, ", rows(), ")"));
  }
  held->assign(ids.count, false);
  std::vector<char> stored;
  // Ids that many places apart are in one partition: all of these at once, in the order of its
  // file.
  const int64_t apart =
      placement_.partitions / std::gcd(placement_.partitions, ids.stride % placement_.partitions);
  for (int64_t begin = 0; begin < std::min(apart, ids.count); ++begin) {
    ASSIGN_OR_RETURN(PartitionChain * partition, PartitionOf(ids.first + begin * ids.stride));
    stored.resize(partition->array().row_bytes());
    for (int64_t i = begin; i < ids.count; i += apart) {
      const int64_t row = placement_.LocalRow(ids.first + i * ids.stride);
      ASSIGN_OR_RETURN(const bool found, partition->ReadRow(row, absl::MakeSpan(stored)));
      if (!found) continue;
      (*held)[i] = true;
      shard::ReadStoredRow(dtype_, stored.data(), absl::MakeSpan(values + i * columns_, columns_));
    }
  }
  return absl::OkStatus();
}

}  // namespace emberd::checkpoint
