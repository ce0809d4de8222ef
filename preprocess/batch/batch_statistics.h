// What a batch needed, as the API shows it.
#pragma once

#include <vector>

#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/batch_storage.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// Writes the statistics of a finished batch from its counters, without a look at its entries;
// reuses the memory of `statistics`. `model` and `plan` belong together.
void WriteStatistics(const v1::ModelConfig& model, const Plan& plan,
                     const std::vector<StackBatch>& stacks, v1::BatchStatistics* statistics);

}  // namespace emberd::preprocess
