// Compiled for AVX2. Nothing but the loop may live here: any inline function that this file shared
// with others could end up as AVX2 code in the whole program.
#define HIGHWAY_BUCKETS HighwayBucketsAvx2
#define HIGHWAY_STATE highwayhash::HHStateT<HH_TARGET_AVX2>
#include "preprocess/batch/highway_buckets.inc.h"
