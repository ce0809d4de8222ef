// What this machine's memory allows at best for the access patterns of the engine: the same rows in
// the same order, with next to no arithmetic. Rows are float32 or anything else of `row_bytes`
// bytes, a multiple of 16; tables lie in huge pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shard/batch.h"
#include "shard/row_order.h"

namespace emberd::bench {

// Reads every row of `entries`, asking for memory `ahead` rows in advance. Returns a checksum.
float GatherLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                  int ahead);

// The same, and writes each row to the next place of `out` as float32 (twice the bytes where the
// table is bfloat16).
void CopyLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
               int ahead, size_t out_bytes, char* out);

// For every touch reads its gradient row; for every distinct row reads and writes `row_bytes` at
// the row's place in the table and `slot_bytes` (4: one float) in the slot, changing nothing but
// single floats. Returns a checksum.
float UpdateLimit(char* table, size_t row_bytes, char* slot, size_t slot_bytes,
                  const float* gradients, size_t gradient_bytes, const shard::Touch* touches,
                  int64_t count, int ahead);

}  // namespace emberd::bench
