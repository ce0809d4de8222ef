// What a coordinator keeps of a batch between Lookup and ApplyGradients: which samples have entries
// on which shard, and which rows the trainer has.
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

// Places [begin, end) among the rows that a shard has answered with for a feature's stack.
struct PlaceRange {
  int shard = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Of the distinct rows of one feature, in the order in which the trainer was sent them instead of
// activations (AnswerRows), and may send sums of gradients for them. Empty: it was sent
// activations.
using RowPlaces = std::vector<PlaceRange>;

inline int64_t CountRows(const RowPlaces& places) {
  int64_t rows = 0;
  for (const PlaceRange& range : places) rows += range.end - range.begin;
  return rows;
}

struct KeptShard {
  uint64_t history = 0;
  int64_t max_joined_bytes = 0;  // see GatherResult
  // By stack: canonical samples that the shard returned, ascending.
  std::vector<std::vector<int32_t>> samples;
  // By stack: its entries, if it answered with unique rows; they name these by their places. Empty:
  // no stack did.
  std::vector<std::shared_ptr<const shard::StackEntries>> entries;
};

// Immutable.
struct KeptBatch {
  KeptBatch() = default;
  // What is to be kept of a batch; result i is shard i's. `places`: see row_places.
  KeptBatch(std::shared_ptr<const ServedModel> served, const preprocess::PreprocessedBatch& batch,
            absl::Span<const GatherResult> results, std::vector<RowPlaces> places = {})
      : model(std::move(served)),
        feature_samples(batch.feature_samples().begin(), batch.feature_samples().end()),
        feature_sample_begin(batch.feature_sample_begin().begin(),
                             batch.feature_sample_begin().end()),
        row_places(std::move(places)) {
    for (const GatherResult& result : results) {
      KeptShard& shard = shards.emplace_back();
      shard.history = result.history;
      shard.max_joined_bytes = result.max_joined_bytes;
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
  // By feature: of the rows that the trainer was sent instead of activations. Empty: no feature has
  // any.
  std::vector<RowPlaces> row_places;
  std::vector<KeptShard> shards;

  // Whether the trainer has rows of the feature.
  bool HasRows(int feature) const { return !row_places.empty() && !row_places[feature].empty(); }

  int64_t bytes() const {
    size_t bytes = sizeof(*this);
    for (const RowPlaces& places : row_places) bytes += places.size() * sizeof(PlaceRange);
    for (const KeptShard& shard : shards) {
      for (const auto& samples : shard.samples) bytes += samples.size() * sizeof(int32_t);
      for (const auto& entries : shard.entries) bytes += entries == nullptr ? 0 : entries->bytes();
    }
    return static_cast<int64_t>(bytes);
  }
};

using BatchStore = HandleStore<const KeptBatch>;

}  // namespace emberd::server
