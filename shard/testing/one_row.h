// The update kernel on one row in plain vectors.
#pragma once

#include <vector>

#include "shard/testing/scalar_optimizers.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard::testing {

// Updates `row` (all columns live; their number a multiple of 8) with gradient `g`, float32
// storage.
inline void KernelUpdate(const StepRule& rule, const std::vector<float>& g, RowValues& row) {
  const int width = static_cast<int>(g.size());
  std::vector<Touch> touches(1 + kTouchPadding);
  touches[0] = {0, 0, 1.0f};
  const RowRange range{0, 1, width, 0};
  UpdateArgs args;
  args.touches = touches.data();
  args.touch_count = 1;
  args.gradients = g.data();
  args.width = width;
  args.ranges = absl::MakeSpan(&range, 1);
  args.weights = reinterpret_cast<char*>(row.w.data());
  for (size_t s = 0; s < row.slots.size(); ++s) args.slots[s] = row.slots[s].data();
  UpdateRows(args, rule);
}

}  // namespace emberd::shard::testing
