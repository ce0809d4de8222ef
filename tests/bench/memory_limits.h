// What this machine's memory allows at best for the access patterns of the engine: the same rows in
// the same order, with next to no arithmetic. Rows are 32, 64, 128, 256 or 512 bytes and lie in
// huge pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shard/batch/batch.h"

namespace emberd::bench {

// How many rows in advance every line of a row is asked for: `near` (at least 1) for the first
// level of cache, and `far`, if above 0, for the second, which keeps more requests under way.
struct Ahead {
  int near;
  int far;
};

// Reads every row of `entries`. Returns a checksum.
int GatherLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                Ahead ahead);

// The same, and writes each row to the next place of `out`, `out_bytes` each: as many as the row
// has, or twice that (bfloat16 to float32).
void CopyLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
               Ahead ahead, size_t out_bytes, char* out);

// What an update must move. `row_bytes` is gradient_bytes, or half of it; `slot_bytes` is
// gradient_bytes, or 4 for one float per row.
struct UpdateTraffic {
  const shard::Touch* touches;
  int64_t count;
  const char* gradients;
  size_t gradient_bytes;
  char* table;
  size_t row_bytes;
  char* slot;
  size_t slot_bytes;
};

// For every touch reads its gradient row; for every distinct row reads and writes its places in the
// table and the slot, changing nothing but single floats. Returns a checksum.
int UpdateLimit(const UpdateTraffic& traffic, Ahead ahead);

}  // namespace emberd::bench
