#include "server/shard/save_files.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/checkpoint/partition_file.h"

namespace emberd::server {
namespace {

// The arrays of a stack in one partition, as a snapshot orders them.
std::vector<PartitionArray> ArraysOf(const shard::Model& model, int stack, int k) {
  const shard::StackStore& store = model.stack(stack);
  PartitionArray array;
  array.model = model.spec().name;
  array.stack = store.spec().name;
  array.array = kWeightsArray;
  array.partition = store.first_partition() + k;
  array.partitions = model.spec().partitions;
  array.dtype = store.dtype();
  array.columns = store.width();
  array.rows_per_partition = store.rows_per_partition();
  std::vector<PartitionArray> arrays = {array};
  for (const shard::StackStore::Slot& slot : store.slots()) {
    array.array = slot.info.name;
    array.dtype = v1::FLOAT32;
    array.columns = slot.columns;
    arrays.push_back(array);
  }
  return arrays;
}

// The files of one partition of one stack: rows go into all of them.
class PartitionFiles {
 public:
  static absl::StatusOr<std::unique_ptr<PartitionFiles>> Create(
      const std::string& folder, const std::vector<PartitionArray>& arrays) {
    auto files = std::make_unique<PartitionFiles>();
    for (const PartitionArray& array : arrays) {
      ASSIGN_OR_RETURN(auto writer, PartitionFileWriter::Create(folder, array));
      files->writers_.push_back(std::move(writer));
      files->row_bytes_.push_back(array.row_bytes());
    }
    return files;
  }

  absl::Status Append(const shard::SnapshotRows& rows) {
    for (size_t i = 0; i < writers_.size(); ++i) {
      const char* next = rows.arrays[i].data();
      for (const shard::SnapshotRows::Run& run : rows.runs) {
        const auto bytes = static_cast<size_t>(run.count * row_bytes_[i]);
        RETURN_IF_ERROR(writers_[i]->Append(run.first, {next, bytes}));
        next += bytes;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Finish(CheckpointFiles* files) {
    for (const auto& writer : writers_) {
      ASSIGN_OR_RETURN(*files->Add(), writer->Finish());
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::unique_ptr<PartitionFileWriter>> writers_;
  std::vector<int64_t> row_bytes_;
};

}  // namespace

absl::Status SaveRows(shard::Snapshot& snapshot, const std::string& folder, ShardProgress& progress,
                      CheckpointFiles* files) {
  // Copies come from any partition at any time, so several may be open at once.
  std::map<std::pair<int, int>, std::unique_ptr<PartitionFiles>> open;
  while (true) {
    if (progress.cancelled) return absl::CancelledError("the save was cancelled");
    ASSIGN_OR_RETURN(const std::optional<shard::SnapshotRows> rows, snapshot.Next());
    if (!rows.has_value()) return absl::OkStatus();
    const std::pair partition(rows->stack, rows->k);
    if (rows->runs.empty()) {
      const auto found = open.find(partition);
      if (found == open.end()) continue;
      RETURN_IF_ERROR(found->second->Finish(files));
      open.erase(found);
      continue;
    }
    std::unique_ptr<PartitionFiles>& to = open[partition];
    if (to == nullptr) {
      ASSIGN_OR_RETURN(
          to, PartitionFiles::Create(folder, ArraysOf(snapshot.model(), rows->stack, rows->k)));
    }
    RETURN_IF_ERROR(to->Append(*rows));
    for (const auto& array : rows->arrays) progress.bytes += static_cast<int64_t>(array.size());
  }
}

}  // namespace emberd::server
