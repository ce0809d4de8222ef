// Compiled for AVX2. Nothing but the loop may live here: any inline function that this file shared
// with others could end up as AVX2 code in the whole program.
#include "preprocess/batch/highway_buckets.h"

namespace emberd::preprocess {

void HighwayBucketsAvx2(int partition_bits, uint32_t partition, const int32_t* local_rows,
                        int64_t n, uint8_t* buckets) {
  HighwayBuckets<highwayhash::HHStateT<HH_TARGET_AVX2>>(partition_bits, partition, local_rows, n,
                                                        buckets);
}

}  // namespace emberd::preprocess
