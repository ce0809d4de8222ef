// The static buffers in which JAX hands a device its share of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "preprocess/batch/sort_and_merge.h"

namespace emberd::preprocess {

// One stack on one device. The three arrays end with the last written cell; cells before it may be
// unwritten, as they are in JAX.
struct JaxDeviceBuffer {
  std::vector<int32_t> row_pointers;  // max(P, 8) per (slot, mini-batch)
  std::vector<int32_t> embedding_ids;
  std::vector<int32_t> sample_ids;
  std::vector<float> gains;
  std::vector<bool> written;
  int64_t dropped = 0;  // entries that the buffer had no room for
};

// Lays the slots of a device into `capacity` cells. Without mini-batching every slot owns an equal
// part, to whose start its row pointers refer; with it, the segments of all slots follow one
// another and row pointers count from the start of the buffer. What does not fit is dropped.
JaxDeviceBuffer FillJaxDeviceBuffer(absl::Span<const SlotCsr> slots, int64_t capacity,
                                    bool minibatching);

}  // namespace emberd::preprocess
