// Which of the 64 vocabulary buckets the entries of a slot fall into, and how full the buckets are.
#pragma once

#include <cstdint>

#include "preprocess/buffer.h"

namespace emberd::preprocess {

inline constexpr int kBuckets = 64;

struct SlotBuckets {
  static constexpr uint8_t kDropped = 255;

  Buffer<uint8_t> bucket;  // [cells of the slot's uncut CSR]: 0 to 63, or kDropped
  Buffer<int32_t>
      multiplicity;  // [cells]: occurrences that merged into the entry; only with id dropping
  // Of every (partition, bucket), before dropping: [partitions * 64].
  Buffer<int32_t> ids;
  Buffer<int32_t> unique;
  Buffer<int32_t> kept;  // ids after dropping
  int64_t dropped = 0;

  int64_t bytes() const {
    return bucket.bytes() + multiplicity.bytes() + ids.bytes() + unique.bytes() + kept.bytes();
  }
};

}  // namespace emberd::preprocess
