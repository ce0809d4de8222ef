// What is done with whole checkpoints: reading every byte of one, or rows of a table by their ids,
// making an incremental one whole, comparing two.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "preprocess/plan/plan.h"
#include "server/checkpoint/partition_file.h"
#include "server/checkpoint/store.h"
#include "shard/store/initializer.h"

namespace emberd::checkpoint {

// Hears how many of all bytes are done; a status that is not OK ends the work with it.
using TransferProgress = absl::FunctionRef<absl::Status(int64_t bytes, int64_t total_bytes)>;

// DATA_LOSS that names each file that is missing, cut off, changed or another one, the first ten of
// them. Of files that cannot be read, the first error. `takes`: asked for each file in turn,
// whether it is to be read.
absl::Status VerifyChain(
    const CheckpointChain& chain, TransferProgress progress,
    absl::FunctionRef<bool()> takes = [] { return true; });

// Bytes of all files of a chain.
int64_t BytesOf(const CheckpointChain& chain);

// Ids first, first + stride, ...: `count` of them.
struct IdRun {
  int64_t first = 0;
  int64_t count = 0;
  int64_t stride = 1;
};

// Rows of a table of a checkpoint by their ids, wherever its files have them. Takes a bounded
// amount of memory, whatever the size of the table. Not thread-safe.
class TableReader {
 public:
  // `slot` empty: the weights. NOT_FOUND: the checkpoint has no such table or slot. The chain must
  // outlive the reader. `verify`: compares the checksum of each file before rows are taken from it;
  // false: somebody has done so.
  static absl::StatusOr<std::unique_ptr<TableReader>> Open(const CheckpointChain* chain,
                                                           const std::string& table,
                                                           const std::string& slot,
                                                           bool verify = true);

  int64_t rows() const { return vocabulary_size_; }
  int columns() const { return columns_; }  // without padding

  // Writes [count, columns]; 16-bit values are widened. Rows that nobody had touched have the
  // initial values that they would have had. Fast where calls ascend and ask for many ids.
  // OUT_OF_RANGE for ids that the table does not have.
  absl::Status Read(const IdRun& ids, float* values);
  // Rows that nobody had touched are left as they are, and `held` is false for them.
  absl::Status ReadHeld(const IdRun& ids, float* values, std::vector<bool>* held);

 private:
  TableReader(const CheckpointChain* chain, bool verify) : chain_(chain), verify_(verify) {}
  absl::Status FindTable(const std::string& table, const std::string& slot);
  absl::Status FindSlot(const v1::TableConfig& table, const std::string& slot);
  absl::StatusOr<PartitionChain*> PartitionOf(int64_t id);
  void InitialRow(int64_t id, float* values) const;

  const CheckpointChain* const chain_;
  const bool verify_;
  std::string stack_;
  std::string array_;
  int64_t vocabulary_size_ = 0;
  int columns_ = 0;
  v1::DataType dtype_ = v1::FLOAT32;
  preprocess::RowPlacement placement_;
  std::optional<shard::Initializer> initializer_;  // of weights
  float initial_value_ = 0;                        // of a slot
  std::map<int, PartitionChain> open_;
  std::set<int> verified_;
};

// Writes the rows of a checkpoint and of all that it builds on into new files, and replaces its own
// by them: at every moment it is one or the other. What builds on it still does. A checkpoint that
// is whole stays as it is. Takes a bounded amount of memory. ABORTED: it was deleted or merged
// meanwhile.
absl::StatusOr<v1::CheckpointInfo> MergeCheckpoint(const CheckpointStore& store,
                                                   const std::string& model,
                                                   const std::string& name,
                                                   TransferProgress progress);

// Every table that both have in the same size and width, and each of its slots that both have; also
// where their numbers of partitions differ. The progress is that of rows as floats. Takes a bounded
// amount of memory.
absl::StatusOr<v1::DiffCheckpointsResponse> DiffCheckpoints(const CheckpointChain& before,
                                                            const CheckpointChain& after,
                                                            TransferProgress progress);

}  // namespace emberd::checkpoint
