// The backward pass over one partition: sum each touched row's gradient, then update the row.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "config/rule_program.h"
#include "emberd/v1/types.pb.h"
#include "shard/kernel_types.h"
#include "shard/optimizers/rules.h"

namespace emberd::shard {

inline constexpr int kMaxSlots = config::kMaxCustomSlots;

struct UpdateArgs {
  const Touch* touches =
      nullptr;  // by (row, sample); kTouchPadding more may be read beyond the last
  int64_t touch_count = 0;
  // The gradient of a touch's sample: a row of `gradients`, [samples, width]; or, if that is null,
  // what gradient_rows[sample] points to, [width], where values that are not finite count as 0
  // unless skip_nonfinite is set. Both null: all zero.
  const float* gradients = nullptr;
  const float* const* gradient_rows = nullptr;
  int width = 0;  // multiple of 8
  absl::Span<const RowRange> ranges;
  char* weights = nullptr;  // of the partition
  v1::DataType dtype = v1::FLOAT32;
  // Weights of 16 bits are rounded at random, column c of a row by the 16-bit number c of the key
  // SubKey(rounding_key, row) (portable_numbers.h).
  bool stochastic_rounding = false;
  uint64_t rounding_key = 0;
  // Rows with a sum that is not finite, before it is clipped, are left as they are.
  bool skip_nonfinite = false;
  float* slots[kMaxSlots + 1] = {};  // of the partition, in storage order
};

struct UpdateCounts {
  int64_t updated = 0;  // rows
  int64_t skipped = 0;
};

// For each row once: g = +0 + gain * gradient[sample] + ... in touch order, multiply and add
// rounded separately; clip g; decay w; the rule; clip w; padding columns back to 0. Same bits on
// every CPU.
UpdateCounts UpdateRows(const UpdateArgs& args, const StepRule& rule);

}  // namespace emberd::shard
