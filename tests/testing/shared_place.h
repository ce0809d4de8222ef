// A block of memory that processes share, as tests of hostile peers name it.
#pragma once

#include <cstdint>

#include "base/regions.h"
#include "emberd/v1/shared_memory.pb.h"

namespace emberd::testing {

// `size` bytes from `offset` of the block on; nothing says that they are inside of it.
inline v1::SharedBlock PlaceIn(const SharedBlock& block, uint64_t offset, uint64_t size) {
  v1::SharedBlock place;
  place.set_region(block.region());
  place.set_offset(block.offset() + offset);
  place.set_size(size);
  return place;
}

}  // namespace emberd::testing
