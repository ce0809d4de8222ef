#include "server/coordinator/row_runs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "base/bfloat16.h"

namespace emberd::server {
namespace {

struct KeptPieces {
  std::shared_ptr<const void> pieces;
  std::vector<char> copied;  // rows that lay in several pieces
};

}  // namespace

void CopyFloats(const char* elements, v1::DataType dtype, int64_t count, float* to) {
  if (dtype == v1::FLOAT32) {
    std::memcpy(to, elements, count * sizeof(float));
  } else {
    FromBfloat16Bytes(elements, absl::MakeSpan(to, count));
  }
}

RowRuns::RowRuns(const char* data, int64_t rows) : given_(true) {
  if (rows > 0) runs_.push_back({0, rows, data});
}

RowRuns::RowRuns(rpc::SharedPieces pieces, int64_t rows, int64_t row_bytes) : given_(true) {
  if (rows == 0 || row_bytes == 0) return;
  const auto size = static_cast<size_t>(row_bytes);
  // A piece makes at most one row that is copied.
  const auto owner = std::make_shared<KeptPieces>();
  std::vector<char>* const copied = &owner->copied;
  owner->pieces = std::move(pieces.owner);
  copied->reserve(std::min(pieces.pieces.size(), static_cast<size_t>(rows)) * size);
  int64_t row = 0;
  size_t begun = 0;  // bytes of `row` in `copied`
  for (absl::string_view piece : pieces.pieces) {
    if (begun > 0) {
      const size_t more = std::min(size - begun, piece.size());
      copied->insert(copied->end(), piece.begin(), piece.begin() + more);
      piece.remove_prefix(more);
      begun = (begun + more) % size;
      if (begun > 0) continue;
      runs_.push_back({row, row + 1, copied->data() + copied->size() - size});
      ++row;
    }
    const auto whole = static_cast<int64_t>(piece.size() / size);
    if (whole > 0) runs_.push_back({row, row + whole, piece.data()});
    row += whole;
    piece.remove_prefix(whole * size);
    copied->insert(copied->end(), piece.begin(), piece.end());
    begun = piece.size();
  }
  owner_ = owner;
}

}  // namespace emberd::server
