// A declared model as a coordinator works with it. Immutable once made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/observed_counts.h"
#include "server/ops/metrics.h"
#include "shard/types.h"

namespace emberd::server {

struct ServedModel {
  uint64_t id = 0;
  v1::ModelConfig config;  // complete
  preprocess::Plan plan;
  std::vector<shard::StackSpec> shard_stacks;  // the stacks of the plan, as shards keep them
  std::unique_ptr<preprocess::Preprocessor> preprocessor;  // refers to config and plan
  absl::flat_hash_map<std::string, int> features;          // name to index in config.features
  absl::flat_hash_map<std::string, int> tables;            // name to index in config.tables
  ops::ModelMetrics* metrics = nullptr;
  std::unique_ptr<ObservedCounts> observed;

  // Counts a batch for metrics and limits.
  void Observe(const preprocess::PreprocessedBatch& batch) const;
  const v1::TableConfig& TableOfFeature(int feature) const {
    return config.tables(tables.at(config.features(feature).table()));
  }
};

// Plans a complete config. `threads`: see PreprocessorOptions.
absl::StatusOr<std::shared_ptr<const ServedModel>> MakeServedModel(
    v1::ModelConfig config, const preprocess::Topology& topology, int threads,
    ops::Metrics* metrics);

}  // namespace emberd::server
