#include "server/checkpoint/chain_work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "server/checkpoint/manifest.h"
#include "server/checkpoint/table_reader.h"
#include "server/files/files.h"

namespace emberd::checkpoint {

// Reading every byte.
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

// Making an incremental one whole.
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

// What differs between two.
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
