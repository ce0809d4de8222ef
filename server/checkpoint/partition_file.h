// Files of rows: one holds those rows of one array of one stack in one partition that somebody
// touched, behind a header that other tools understand. A chain of such files has the rows of a
// checkpoint and of all that it builds on.
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
#include "base/buffers.h"
#include "base/file_descriptor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/types.pb.h"

namespace emberd::checkpoint {

// What a file is about: weights or a slot of one stack in one partition.
inline constexpr char kWeightsArray[] = "weights";

struct PartitionArray {
  std::string model;
  std::string stack;
  std::string array;  // "weights" or a slot
  int partition = 0;
  int partitions = 1;
  v1::DataType dtype = v1::FLOAT32;  // as rows are stored
  int columns = 0;                   // of a row, padding included
  int64_t rows_per_partition = 0;

  int64_t row_bytes() const;
};

// The array of a model as a checkpoint has it. NOT_FOUND: it has none of this name.
absl::StatusOr<PartitionArray> FindPartitionArray(const v1::CheckpointManifest& manifest,
                                                  absl::string_view stack, absl::string_view array,
                                                  int partition);

// Local rows [begin, end) of a partition, as the file has them.
struct LocalRows {
  int32_t begin = 0;
  int32_t end = 0;
};

// INVALID_ARGUMENT unless the ranges lie in [0, rows_per_partition), are not empty and do not
// overlap.
absl::Status CheckLocalRows(absl::Span<const LocalRows> ranges, int64_t rows_per_partition);

// Writes a new file. Not thread-safe. A file that was not finished is none that a reader opens.
class PartitionFileWriter {
 public:
  static absl::StatusOr<std::unique_ptr<PartitionFileWriter>> Create(const std::string& folder,
                                                                     const PartitionArray& array);
  // Local rows from first_row on, as they are stored. If they follow the last rows of the call
  // before, both are one range. No row may come twice.
  absl::Status Append(int64_t first_row, absl::Span<const char> rows);
  // Writes the rest, and waits until all of it has reached the disk. The last call.
  absl::StatusOr<v1::CheckpointFile> Finish();

 private:
  PartitionFileWriter(const PartitionArray& array, std::string name, std::string path,
                      FileDescriptor file, MappedMemory buffer);
  absl::Status AppendBytes(absl::Span<const char> bytes);
  absl::Status Flush();
  // Writes around the system's cache, or from now on through it.
  void SetDirect(bool direct);

  const PartitionArray array_;
  const std::string name_;
  const std::string path_;
  FileDescriptor file_;
  const int64_t header_size_;
  bool direct_ = false;
  int64_t data_bytes_ = 0;  // written behind the header
  uint32_t data_crc32c_ = 0;
  const MappedMemory buffer_;  // its first bytes are written next
  size_t buffered_ = 0;        // how many
  std::vector<LocalRows> ranges_;
  int64_t rows_ = 0;
};

// Reads a file that a manifest lists. Not thread-safe.
class PartitionFileReader {
 public:
  // DATA_LOSS, with the file's name, unless size and header are those that the manifest says and
  // the file is about `array`. Of the rows nothing is read yet.
  static absl::StatusOr<std::unique_ptr<PartitionFileReader>> Open(const std::string& folder,
                                                                   const v1::CheckpointFile& file,
                                                                   const PartitionArray& array);

  // In the order of the file.
  const std::vector<LocalRows>& ranges() const { return ranges_; }

  // Hands out all rows in the order of the file, in blocks of about 1 MiB at most. DATA_LOSS in the
  // end if they are not those that were written: what was handed out is then worth nothing.
  absl::Status Stream(
      absl::FunctionRef<absl::Status(int64_t first_row, absl::Span<const char> rows)> use);
  // Reads all and compares checksums; `read` hears how many more bytes were.
  absl::Status Verify(absl::FunctionRef<absl::Status(int64_t bytes)> read);
  // One row; false if the file does not hold it. Fast where rows ascend. Does not compare
  // checksums.
  absl::StatusOr<bool> ReadRow(int64_t row, absl::Span<char> out);

 private:
  // A range, and where its first row stands in the file.
  struct PlacedRange {
    LocalRows rows;
    int64_t position = 0;
  };

  PartitionFileReader(const PartitionArray& array, std::string path, const v1::CheckpointFile& info,
                      FileDescriptor file)
      : array_(array), path_(std::move(path)), info_(info), file_(std::move(file)) {}
  absl::Status ReadHeader();
  absl::Status ReadRanges(int64_t count);
  const PlacedRange* Find(int64_t row);
  absl::Status LoadWindow(const PlacedRange& range, int64_t position);

  const PartitionArray array_;
  const std::string path_;
  const v1::CheckpointFile info_;
  const FileDescriptor file_;
  int64_t header_size_ = 0;
  std::vector<LocalRows> ranges_;
  std::vector<PlacedRange> sorted_;  // ascending
  size_t last_found_ = 0;            // in sorted_
  std::vector<char> window_;         // rows of the file from window_begin_ on
  int64_t window_begin_ = 0;
  int64_t window_rows_ = 0;
};

// The rows of one array in one partition, as a checkpoint and those that it builds on have them.

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

}  // namespace emberd::checkpoint
