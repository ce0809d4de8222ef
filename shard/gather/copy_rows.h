// Gather without pooling: rows copied as they are stored.
#pragma once

#include <cstdint>

namespace emberd::shard {

struct CopyRowsArgs {
  const char* weights = nullptr;  // [rows, row_bytes]
  int64_t row_bytes = 0;          // a multiple of 16
  const uint32_t* rows = nullptr;
  int64_t count = 0;
  char* out = nullptr;  // [count, row_bytes]
};

// out[i] = weights[rows[i]].
void CopyRows(const CopyRowsArgs& args);

}  // namespace emberd::shard
