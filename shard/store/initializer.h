// Initial values of a table, one row at a time, from (seed, table name, row, column) alone.
//
// Column c of row r uses the 64-bit word c + 1 of the row's key (portable_numbers.h); a normal
// value is the quantile of that word, so that each column costs one word.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"

namespace emberd::shard {

// Immutable, thread-safe.
class Initializer {
 public:
  Initializer(uint64_t seed, absl::string_view table, const v1::InitializerConfig& config);

  // Writes the first values.size() columns of logical row `row`.
  void Fill(int64_t row, absl::Span<float> values) const;
  // True if every value is +0, so that fresh memory already holds the rows.
  bool AllZero() const;

 private:
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal, kRowId };
  float Value(uint64_t word) const;

  uint64_t key_;
  Kind kind_ = Kind::kConstant;
  double a_ = 0;  // value, lower, or mean
  double b_ = 0;  // upper, or standard deviation
};

}  // namespace emberd::shard
