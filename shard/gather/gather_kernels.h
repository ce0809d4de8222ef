// The kernels of the forward pass: rows gathered, quantized, weighted and pooled, or copied as they
// are stored.
#pragma once

#include <cstdint>

#include "emberd/v1/types.pb.h"
#include "shard/kernel_types.h"

namespace emberd::shard {

struct ForwardArgs {
  const char* weights = nullptr;  // [rows, width] of dtype
  v1::DataType dtype = v1::FLOAT32;
  int width = 0;  // multiple of 8
  int partitions = 1;
  // Rows below partition_ends[k] lie in partition k or an earlier one: [partitions]. Needed for
  // more than one partition.
  const uint64_t* partition_ends = nullptr;
  const Entry* entries = nullptr;  // kEntryPadding more may be read beyond the last
  const uint32_t* offsets = nullptr;
  // Samples [begin, end) of the stack; sums[i, width] for sample i, or, if `rows` is not null,
  // rows[i], [width].
  int64_t begin = 0;
  int64_t end = 0;
  float* sums = nullptr;
  float* const* rows = nullptr;
  bool quantized = false;
  float lower = 0, upper = 0;
  int num_buckets = 2;
};

// For each sample and partition: +0 + gain * row + gain * row ... in entry order, multiply and add
// rounded separately; then the partitions' sums by a balanced binary tree, those without an entry
// left out. Same bits on every CPU.
void SumRows(const ForwardArgs& args);

struct CopyRowsArgs {
  const char* weights = nullptr;  // [rows, row_bytes]
  int64_t row_bytes = 0;          // a multiple of 16
  const uint32_t* rows = nullptr;
  int64_t count = 0;
  char* out = nullptr;  // [count, row_bytes]
};

// out[i] = weights[rows[i]].
void CopyRows(const CopyRowsArgs& args);
// The weights are float32. out[i] = ToBfloat16(+0 + weights[rows[i]]): [count, row_bytes / 2].
void CopyRoundedRows(const CopyRowsArgs& args);

}  // namespace emberd::shard
