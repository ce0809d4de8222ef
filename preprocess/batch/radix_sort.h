// Sorts the keys of a slot.
#pragma once

#include <cstdint>

namespace emberd::preprocess {

// Sorts n keys ascending by bits [32, 32 + live_bits), keeping the order of keys that are equal
// there; higher bits are zero and lower bits ascend. `spare` has room for n keys. Returns the array
// that holds the result: `keys` or `spare`. LSD radix sort; passes in which all keys agree are left
// out.
uint64_t* SortKeys(uint64_t* keys, uint64_t* spare, int64_t n, int live_bits);

}  // namespace emberd::preprocess
