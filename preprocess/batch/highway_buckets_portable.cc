#define HIGHWAY_BUCKETS HighwayBucketsPortable
#define HIGHWAY_STATE highwayhash::HHStateT<HH_TARGET_Portable>
#include "preprocess/batch/highway_buckets.inc.h"
