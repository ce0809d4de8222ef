// Kernels for whoever stands between a trainer and the shards: activations rounded, gradients
// summed by row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emberd/v1/types.pb.h"
#include "shard/kernel_types.h"

namespace emberd::shard {

// out[i] = ToBfloat16(values[i]); neither needs to be aligned.
void RoundToBfloat16(const float* values, int64_t count, char* out);

struct SingleRowsArgs {
  const char* const* rows = nullptr;     // [count], each [dim] and more; null: a row of +0
  v1::DataType row_dtype = v1::FLOAT32;  // or BFLOAT16: rounded already
  int64_t count = 0;
  int64_t dim = 0;
  char* out = nullptr;               // row i, of `dim` elements, at out + i * stride
  v1::DataType dtype = v1::FLOAT32;  // or BFLOAT16; that if the rows are
  size_t stride = 0;                 // bytes
};

// Activations of samples that have one row each: +0 + row, rounded to `dtype`.
void CopySingleRows(const SingleRowsArgs& args);

struct RowSumArgs {
  // Gradients of samples of one feature, [samples, dim], float32 or bfloat16, at any alignment.
  const char* gradients = nullptr;
  v1::DataType dtype = v1::FLOAT32;
  int64_t first_sample = 0;  // the canonical number of the first one
  int64_t dim = 0;
  int64_t width = 0;  // of the sums; columns from `dim` on are padding
  // Samples [begin, end) of a batch, which are of the feature: as StackEntries has them, with rows
  // named by their places.
  const int32_t* samples = nullptr;
  const uint32_t* offsets = nullptr;
  const Entry* entries = nullptr;  // kEntryPadding more may be read beyond the last
  int64_t begin = 0;
  int64_t end = 0;
  float* sums = nullptr;     // [rows, width]
  uint8_t* begun = nullptr;  // [rows]; 0: the row has no sum yet, and memory that may hold anything
};

// For each entry of each sample: sum = sum + gain * gradient, multiply and add rounded separately,
// from +0 on. Same bits on every CPU, and as UpdateRows sums. Whether all sums are finite that it
// has written; one that was not does not become so again.
bool AddToRowSums(const RowSumArgs& args);

}  // namespace emberd::shard
