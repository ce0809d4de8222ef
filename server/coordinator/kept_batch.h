// What a coordinator keeps of a batch between Lookup and ApplyGradients: which samples have entries
// on which shard.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/served_model.h"
#include "server/rpc/handle_store.h"
#include "server/shard/shard_backend.h"
#include "shard/batch/batch.h"

namespace emberd::server {

struct KeptShard {
  uint64_t history = 0;
  // By stack: canonical samples that the shard returned, ascending.
  std::vector<std::vector<int32_t>> samples;
  // By stack: its entries, if it answered with unique rows; they name these by their places. Empty:
  // no stack did.
  std::vector<std::shared_ptr<const shard::StackEntries>> entries;
};

// Immutable.
struct KeptBatch {
  KeptBatch() = default;
  // What is to be kept of a batch; result i is shard i's.
  KeptBatch(std::shared_ptr<const ServedModel> served, const preprocess::PreprocessedBatch& batch,
            absl::Span<const GatherResult> results)
      : model(std::move(served)),
        feature_samples(batch.feature_samples().begin(), batch.feature_samples().end()),
        feature_sample_begin(batch.feature_sample_begin().begin(),
                             batch.feature_sample_begin().end()) {
    for (const GatherResult& result : results) {
      KeptShard& shard = shards.emplace_back();
      shard.history = result.history;
      for (const StackSumsView& stack : result.stacks) {
        shard.samples.emplace_back(stack.samples.begin(), stack.samples.end());
      }
      for (const auto& later : result.later) {
        shard.entries.emplace_back(later, later == nullptr ? nullptr : &later->entries());
      }
    }
  }

  std::shared_ptr<const ServedModel> model;
  std::vector<int64_t> feature_samples;       // by feature of the config
  std::vector<int64_t> feature_sample_begin;  // by feature: its first canonical sample in the stack
  std::vector<KeptShard> shards;

  int64_t bytes() const {
    size_t bytes = sizeof(*this);
    for (const KeptShard& shard : shards) {
      for (const auto& samples : shard.samples) bytes += samples.size() * sizeof(int32_t);
      for (const auto& entries : shard.entries) bytes += entries == nullptr ? 0 : entries->bytes();
    }
    return static_cast<int64_t>(bytes);
  }
};

using BatchStore = HandleStore<const KeptBatch>;

}  // namespace emberd::server
