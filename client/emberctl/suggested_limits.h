// Limits of partitions from what batches needed.
#pragma once

#include <cstdint>

#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"

namespace emberd::emberctl {

// Adds what `more` counted.
void MergeSketch(const v1::CountSketch& more, v1::CountSketch* sketch);
int64_t Batches(const v1::CountSketch& sketch);
// The smallest count that at least `fraction` of the batches did not exceed, up to the width of a
// bucket; 0 without batches.
int64_t Quantile(const v1::CountSketch& sketch, double fraction);
// ceil(max * headroom), rounded up to 8; 0 for a max of 0.
int32_t SuggestedLimit(int64_t max, double headroom);
// Gives every table of a stack the suggested limits of the stack. Stacks without ids stay as they
// are.
v1::ModelConfig WithSuggestedLimits(const v1::DescribeModelResponse& model,
                                    const v1::GetLimitsResponse& limits, double headroom);

}  // namespace emberd::emberctl
