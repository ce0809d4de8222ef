// What a coordinator keeps of a batch between Lookup and ApplyGradients: which samples each shard
// has a part of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "server/base/handle_store.h"
#include "server/coordinator/served_model.h"

namespace emberd::server {

struct KeptShard {
  uint64_t incarnation = 0;
  // By stack: canonical samples that the shard returned, ascending.
  std::vector<std::vector<int32_t>> samples;
};

// Immutable.
struct KeptBatch {
  std::shared_ptr<const ServedModel> model;
  std::vector<int64_t> feature_samples;       // by feature of the config
  std::vector<int64_t> feature_sample_begin;  // by feature: its first canonical sample in the stack
  std::vector<KeptShard> shards;

  int64_t bytes() const {
    int64_t bytes = sizeof(*this);
    for (const KeptShard& shard : shards) {
      for (const std::vector<int32_t>& samples : shard.samples) {
        bytes += static_cast<int64_t>(samples.size() * sizeof(int32_t));
      }
    }
    return bytes;
  }
};

using BatchStore = HandleStore<const KeptBatch>;

}  // namespace emberd::server
