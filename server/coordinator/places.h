// Sums that shards write straight to where the activations of a lookup are read, with no copy in
// between. Of a sample with entries on several shards, the first of them writes its part there and
// passes the others over, whose parts CombineActivations adds.
#pragma once

#include <cstdint>
#include <vector>

#include "emberd/v1/types.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/served_model.h"
#include "server/coordinator/shared_tensors.h"
#include "shard/types.h"

namespace emberd::server {

// The places in `output` of all stacks whose sums are activations as they are: float32, without
// padding columns. Nothing is passed over.
std::vector<shard::SumPlaces> PlacesOfSums(const ServedModel& model,
                                           const preprocess::PreprocessedBatch& batch,
                                           v1::DataType dtype, const SharedOutput& output);

// Has the shards after the one with this view pass over the samples that it has entries of.
// `view`: of the stack of `places`.
void PassOver(const preprocess::StackBatchView& view, shard::SumPlaces* places);

}  // namespace emberd::server
