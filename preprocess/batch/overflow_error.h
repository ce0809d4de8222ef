// The answer to a batch that no cut of the vocabulary brings below its limits.
#pragma once

#include "absl/status/status.h"
#include "preprocess/batch/slot_buckets.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// RESOURCE_EXHAUSTED: names the table with most of the offending entries, the partition, the source
// slot, counts, limits and the ways out. `slot` is the source slot, `csr` and `buckets` are its.
absl::Status OverflowError(const StackPlan& stack, int slot, const SlotCsr& csr,
                           const SlotBuckets& buckets, const Overflow& overflow);

}  // namespace emberd::preprocess
