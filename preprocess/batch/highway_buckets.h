// Low six bits of the HighwayHash-64 of stacked ids, many at a time; compiled once for each kind of
// machine.
#pragma once

#include <cstdint>

#include "highwayhash/highwayhash.h"

namespace emberd::preprocess {

// JAX's key.
inline constexpr uint64_t kHighwayKey[4] = {0x4451e30f87db9609, 0xca7358a1fd2737f8,
                                            0x4b2c991fcee4fdea, 0x0b2658e18326f6ba};

// buckets[i] = hash(local_rows[i] << partition_bits | partition) mod 64. Same results, different
// machines.
void HighwayBucketsPortable(int partition_bits, uint32_t partition, const int32_t* local_rows,
                            int64_t n, uint8_t* buckets);
// Needs a processor with AVX2.
void HighwayBucketsAvx2(int partition_bits, uint32_t partition, const int32_t* local_rows,
                        int64_t n, uint8_t* buckets);

// The loop of both. Each file that uses it has one of its own: shared, it could end up as AVX2 code
// in the whole program.
namespace {
template <typename State>
void HighwayBuckets(int partition_bits, uint32_t partition, const int32_t* local_rows, int64_t n,
                    uint8_t* buckets) {
  alignas(32) const highwayhash::HHKey key = {kHighwayKey[0], kHighwayKey[1], kHighwayKey[2],
                                              kHighwayKey[3]};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t id = static_cast<uint32_t>(local_rows[i]) << partition_bits | partition;
    State state(key);
    highwayhash::HHResult64 hash;
    highwayhash::HighwayHashT(&state, reinterpret_cast<const char*>(&id), sizeof(id), &hash);
    buckets[i] = static_cast<uint8_t>(hash % 64);
  }
}
}  // namespace

}  // namespace emberd::preprocess
