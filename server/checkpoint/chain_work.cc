#include "server/checkpoint/chain_work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "config/shared_tables.h"
#include "server/checkpoint/manifest.h"
#include "server/files/files.h"
#include "shard/store/stack_store.h"

namespace emberd::checkpoint {

// ---- Reading every byte

namespace {

constexpr size_t kMostNamed = 10;

absl::Status VerifyRows(const internal::v1::CheckpointSource& source,
                        const v1::CheckpointFile& file,
                        absl::FunctionRef<absl::Status(int64_t)> read) {
  ASSIGN_OR_RETURN(const PartitionArray array, FindPartitionArray(source.manifest(), file.stack(),
                                                                  file.array(), file.partition()));
  ASSIGN_OR_RETURN(const auto reader, PartitionFileReader::Open(source.folder(), file, array));
  return reader->Verify(read);
}

}  // namespace

int64_t BytesOf(const CheckpointChain& chain) {
  int64_t bytes = 0;
  for (const auto& source : chain) bytes += InfoOf(source.manifest()).bytes();
  return bytes;
}

absl::Status VerifyChain(const CheckpointChain& chain, TransferProgress progress,
                         absl::FunctionRef<bool()> takes) {
  const int64_t total = BytesOf(chain);
  int64_t bytes = 0;
  std::vector<std::string> damages;
  const auto read = [&](int64_t more) { return progress(bytes += more, total); };
  // Goes on after damage: all of it counts to whoever must find another copy.
  const auto note = [&](const absl::Status& status) {
    if (!files::IsGone(status)) return status;
    if (damages.size() < kMostNamed) damages.emplace_back(status.message());
    return absl::OkStatus();
  };
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().states()) {
      if (!takes()) continue;
      RETURN_IF_ERROR(note(files::ReadListedFile(source.folder(), file).status()));
      RETURN_IF_ERROR(read(file.bytes()));
    }
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      if (takes()) RETURN_IF_ERROR(note(VerifyRows(source, file, read)));
    }
  }
  if (damages.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrJoin(damages, "; "));
}

// ---- Reading rows by their ids

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

// ---- Making an incremental one whole

namespace {

constexpr int64_t kMergeBlockBytes = int64_t{1} << 20;
constexpr absl::Duration kHeartbeat = absl::Seconds(5);

// (stack, array, partition) of each file to be.
std::set<std::tuple<std::string, std::string, int>> Parts(const CheckpointChain& chain) {
  std::set<std::tuple<std::string, std::string, int>> parts;
  for (const auto& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      parts.insert({file.stack(), file.array(), file.partition()});
    }
  }
  return parts;
}

// All held rows, ascending: so they are the fastest to read.
absl::Status CopyRows(PartitionChain& from, PartitionFileWriter& to,
                      absl::FunctionRef<absl::Status(int64_t)> read) {
  const int64_t row_bytes = from.array().row_bytes();
  const int64_t block_rows = std::max<int64_t>(1, kMergeBlockBytes / row_bytes);
  std::vector<char> block(block_rows * row_bytes);
  for (const LocalRows& range : from.HeldRows()) {
    for (int64_t begin = range.begin; begin < range.end; begin += block_rows) {
      const int64_t rows = std::min<int64_t>(block_rows, range.end - begin);
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = absl::MakeSpan(block.data() + i * row_bytes, row_bytes);
        RETURN_IF_ERROR(from.ReadRow(begin + i, row).status());
      }
      RETURN_IF_ERROR(to.Append(begin, absl::MakeConstSpan(block.data(), rows * row_bytes)));
      RETURN_IF_ERROR(read(0));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteMerged(const CheckpointChain& chain, const std::string& folder,
                         absl::FunctionRef<absl::Status(int64_t)> read,
                         v1::CheckpointManifest* manifest) {
  for (const auto& [stack, array, partition] : Parts(chain)) {
    ASSIGN_OR_RETURN(PartitionChain rows, PartitionChain::Open(chain, stack, array, partition));
    // First, for a row of a damaged file would get a good checksum.
    RETURN_IF_ERROR(rows.Verify(read));
    ASSIGN_OR_RETURN(const auto writer, PartitionFileWriter::Create(folder, rows.array()));
    RETURN_IF_ERROR(CopyRows(rows, *writer, read));
    ASSIGN_OR_RETURN(*manifest->add_files(), writer->Finish());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::CheckpointInfo> MergeCheckpoint(const CheckpointStore& store,
                                                   const std::string& model,
                                                   const std::string& name,
                                                   TransferProgress progress) {
  ASSIGN_OR_RETURN(const CheckpointChain chain, store.Chain(model, name));
  if (chain.size() == 1) return InfoOf(chain.front().manifest());
  ASSIGN_OR_RETURN(const std::string folder, store.BeginSave(model, /*name=*/""));
  const absl::Cleanup abandon = [&] { store.Abandon(folder); };

  v1::CheckpointManifest manifest = chain.front().manifest();
  manifest.clear_files();
  manifest.clear_parent();
  manifest.clear_parent_id();
  manifest.clear_chain();
  const int64_t total = BytesOf(chain);
  int64_t bytes = 0;
  absl::Time beat = SteadyNow();
  const auto read = [&](int64_t more) -> absl::Status {
    bytes += more;
    if (SteadyNow() - beat > kHeartbeat) {
      RETURN_IF_ERROR(store.Heartbeat(folder));
      beat = SteadyNow();
    }
    return progress(bytes, total);
  };
  RETURN_IF_ERROR(WriteMerged(chain, folder, read, &manifest));
  RETURN_IF_ERROR(store.CommitMerge(folder, manifest));
  return InfoOf(manifest);
}

// ---- What differs between two

namespace {

constexpr int64_t kBlockFloats = int64_t{1} << 18;

// An array that both have.
struct Pair {
  v1::ArrayDiff diff;
  std::unique_ptr<TableReader> before;
  std::unique_ptr<TableReader> after;

  int64_t floats() const { return after->rows() * after->columns(); }
};

absl::Status AddPair(const CheckpointChain& before, const CheckpointChain& after,
                     const std::string& table, const std::string& slot, std::vector<Pair>* pairs) {
  Pair pair;
  pair.diff.set_table(table);
  pair.diff.set_slot(slot);
  auto reader = TableReader::Open(&before, table, slot);
  if (absl::IsNotFound(reader.status())) return absl::OkStatus();
  RETURN_IF_ERROR(reader.status());
  pair.before = *std::move(reader);
  ASSIGN_OR_RETURN(pair.after, TableReader::Open(&after, table, slot));
  pair.diff.set_rows(pair.after->rows());
  const bool same =
      pair.before->rows() == pair.after->rows() && pair.before->columns() == pair.after->columns();
  if (same) pairs->push_back(std::move(pair));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Pair>> Pairs(const CheckpointChain& before,
                                        const CheckpointChain& after) {
  std::vector<Pair> pairs;
  for (const v1::TableConfig& table : after.front().manifest().config().tables()) {
    RETURN_IF_ERROR(AddPair(before, after, table.name(), "", &pairs));
    for (const config::SlotInfo& slot : config::OptimizerSlots(table.optimizer())) {
      RETURN_IF_ERROR(AddPair(before, after, table.name(), slot.name, &pairs));
    }
  }
  return pairs;
}

// Infinite if one of them is no number.
double Difference(float a, float b) {
  const double difference = std::abs(static_cast<double>(a) - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

void CompareRows(const float* before, const float* after, int columns, v1::ArrayDiff* diff) {
  if (std::memcmp(before, after, columns * sizeof(float)) == 0) return;
  diff->set_rows_changed(diff->rows_changed() + 1);
  for (int c = 0; c < columns; ++c) {
    if (std::memcmp(before + c, after + c, sizeof(float)) == 0) continue;
    diff->set_max_difference(std::max(diff->max_difference(), Difference(before[c], after[c])));
  }
}

absl::Status Compare(Pair* pair, absl::FunctionRef<absl::Status(int64_t)> read) {
  const int columns = pair->after->columns();
  const int64_t block = std::max<int64_t>(1, kBlockFloats / columns);
  std::vector<float> before(block * columns);
  std::vector<float> after(block * columns);
  for (int64_t first = 0; first < pair->after->rows(); first += block) {
    const int64_t rows = std::min(block, pair->after->rows() - first);
    RETURN_IF_ERROR(pair->before->Read({.first = first, .count = rows}, before.data()));
    RETURN_IF_ERROR(pair->after->Read({.first = first, .count = rows}, after.data()));
    for (int64_t i = 0; i < rows; ++i) {
      CompareRows(before.data() + i * columns, after.data() + i * columns, columns, &pair->diff);
    }
    RETURN_IF_ERROR(read(rows * columns * static_cast<int64_t>(sizeof(float))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::DiffCheckpointsResponse> DiffCheckpoints(const CheckpointChain& before,
                                                            const CheckpointChain& after,
                                                            TransferProgress progress) {
  ASSIGN_OR_RETURN(std::vector<Pair> pairs, Pairs(before, after));
  int64_t total = 0;
  for (const Pair& pair : pairs) total += pair.floats() * static_cast<int64_t>(sizeof(float));
  int64_t bytes = 0;
  v1::DiffCheckpointsResponse response;
  response.set_config_difference(config::FirstDifference(before.front().manifest().config(),
                                                         after.front().manifest().config()));
  for (Pair& pair : pairs) {
    RETURN_IF_ERROR(Compare(&pair, [&](int64_t more) { return progress(bytes += more, total); }));
    *response.add_arrays() = std::move(pair.diff);
    pair.before.reset();  // and their windows
    pair.after.reset();
  }
  return response;
}

}  // namespace emberd::checkpoint
