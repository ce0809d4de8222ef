// What one file of rows is about: weights or a slot of one stack in one partition; and the header
// that says so to other tools.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/types.pb.h"

namespace emberd::checkpoint {

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

// "STACK.ARRAY.p0007.safetensors".
std::string PartitionFileName(const PartitionArray& array);

// Tensors `values` [rows, columns] and then `row_ranges` int32 [ranges, 2].
struct PartitionHeader {
  int64_t rows = 0;
  int64_t ranges = 0;
};
// Bytes of the header of any file of the array: it is written when all else is.
int64_t PartitionHeaderSize(const PartitionArray& array);
std::string EncodePartitionHeader(const PartitionArray& array, const PartitionHeader& header);
// The header of a file with `data_bytes` behind it, without its first 8 bytes. INVALID_ARGUMENT
// unless it is one of this array.
absl::StatusOr<PartitionHeader> ParsePartitionHeader(absl::string_view text,
                                                     const PartitionArray& array,
                                                     int64_t data_bytes);

}  // namespace emberd::checkpoint
