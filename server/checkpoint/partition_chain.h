// The rows of one array in one partition, as a checkpoint and those that it builds on have them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/checkpoint/partition_file.h"

namespace emberd::server {

// A checkpoint with all that it builds on: it first, the whole one last.
using CheckpointChain = std::vector<internal::v1::CheckpointSource>;

// Not thread-safe.
class PartitionChain {
 public:
  // A partition that no file of the chain has is one without rows.
  static absl::StatusOr<PartitionChain> Open(const CheckpointChain& chain, absl::string_view stack,
                                             absl::string_view array, int partition);
  const PartitionArray& array() const { return array_; }

  // As PartitionFileReader::Verify, of all files.
  absl::Status Verify(absl::FunctionRef<absl::Status(int64_t bytes)> read);
  // The local rows that some file holds; ascending, not touching one another.
  std::vector<LocalRows> HeldRows() const;
  // One row as the newest file that holds it has it; false if none does. Fast where rows ascend.
  absl::StatusOr<bool> ReadRow(int64_t row, absl::Span<char> out);

 private:
  PartitionArray array_;
  std::vector<std::unique_ptr<PartitionFileReader>> readers_;  // newest first
};

}  // namespace emberd::server
