// The loop of highway_buckets.h, for the state type and function name that the including file
// defines.
#include "highwayhash/highwayhash.h"
#include "preprocess/batch/highway_buckets.h"

namespace emberd::preprocess {

void HIGHWAY_BUCKETS(int partition_bits, uint32_t partition, const int32_t* local_rows, int64_t n,
                     uint8_t* buckets) {
  alignas(32) const highwayhash::HHKey key = {kHighwayKey[0], kHighwayKey[1], kHighwayKey[2],
                                              kHighwayKey[3]};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t id = static_cast<uint32_t>(local_rows[i]) << partition_bits | partition;
    HIGHWAY_STATE state(key);
    highwayhash::HHResult64 hash;
    highwayhash::HighwayHashT(&state, reinterpret_cast<const char*>(&id), sizeof(id), &hash);
    buckets[i] = static_cast<uint8_t>(hash % 64);
  }
}

}  // namespace emberd::preprocess
