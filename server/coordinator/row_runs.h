// The rows of a tensor where they are: in one piece, or in the slices of the message that brought
// them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "emberd/v1/types.pb.h"
#include "server/rpc/wire.h"

namespace emberd::server {

// Copies `count` elements, float32 or bfloat16 at any alignment, as floats.
void CopyFloats(const char* elements, v1::DataType dtype, int64_t count, float* to);

// Immutable; copies share what they refer to.
class RowRuns {
 public:
  // Rows [begin, end), one after the other.
  struct Run {
    int64_t begin = 0;
    int64_t end = 0;
    const char* data = nullptr;
  };

  // No tensor.
  RowRuns() = default;
  // In one piece, which must outlive this.
  RowRuns(const char* data, int64_t rows);
  // In pieces, which have rows * row_bytes bytes. Rows that begin in one piece and end in another
  // are copied.
  RowRuns(rpc::SharedPieces pieces, int64_t rows, int64_t row_bytes);

  // Whether there is a tensor, which may have no rows.
  bool given() const { return given_; }
  // In the order of the rows, and all of them; no run is empty.
  absl::Span<const Run> runs() const { return runs_; }
  int64_t rows() const { return runs_.empty() ? 0 : runs_.back().end; }

 private:
  bool given_ = false;
  std::vector<Run> runs_;
  std::shared_ptr<const void> owner_;  // null if the rows are in one piece, which others keep
};

}  // namespace emberd::server
