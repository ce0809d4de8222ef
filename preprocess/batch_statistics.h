// What a batch needed, as the API shows it.
#pragma once

#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch_storage.h"
#include "preprocess/plan.h"

namespace emberd::preprocess {

// Writes the statistics of a finished batch; reuses the memory of `statistics`.
void WriteStatistics(const Plan& plan, const std::vector<StackBatch>& stacks,
                     v1::BatchStatistics* statistics);

}  // namespace emberd::preprocess
