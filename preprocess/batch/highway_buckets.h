// Low six bits of the HighwayHash-64 of stacked ids, many at a time.
#pragma once

#include <cstdint>

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

}  // namespace emberd::preprocess
