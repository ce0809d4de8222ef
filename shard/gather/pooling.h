// What pooling a batch needs besides its rows: the arguments of the forward kernel, and how to
// share its samples among threads.
#pragma once

#include <cstdint>
#include <vector>

#include "shard/batch/batch.h"
#include "shard/gather/gather_kernels.h"
#include "shard/types.h"

namespace emberd::shard {

// `weights`: the rows that `entries` name, as `spec` stores them. All samples.
ForwardArgs MakeForwardArgs(const StackSpec& spec, const char* weights, const StackEntries& entries,
                            float* sums);

// Samples [begins[c], begins[c + 1]) make chunk c; chunks have about the same number of entries. At
// least one chunk.
std::vector<int64_t> CutSamples(const StackEntries& entries, int width);

}  // namespace emberd::shard
