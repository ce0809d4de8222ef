// What a coordinator keeps of a batch between Lookup and ApplyGradients: which samples each shard
// has a part of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/served_model.h"
#include "server/rpc/handle_store.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

struct KeptShard {
  uint64_t incarnation = 0;
  // By stack: canonical samples that the shard returned, ascending.
  std::vector<std::vector<int32_t>> samples;
};

// Random, so that handles of different coordinators and lives do not meet; never 0.
uint64_t NewBatchHandle();

// Immutable.
struct KeptBatch {
  KeptBatch() = default;
  // What is to be kept of a batch; result i is shard i's.
  KeptBatch(std::shared_ptr<const ServedModel> served, const preprocess::PreprocessedBatch& batch,
            absl::Span<const GatherResult> results);

  std::shared_ptr<const ServedModel> model;
  std::vector<int64_t> feature_samples;       // by feature of the config
  std::vector<int64_t> feature_sample_begin;  // by feature: its first canonical sample in the stack
  std::vector<KeptShard> shards;

  int64_t bytes() const;
};

using BatchStore = HandleStore<const KeptBatch>;

}  // namespace emberd::server
