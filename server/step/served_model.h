// A declared model as a coordinator works with it, what its batches needed, and what is kept of a
// batch between its lookup and its update.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_models.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/plan/plan.h"
#include "server/host/shard_backend.h"
#include "server/ops/metrics.h"
#include "server/rpc/budgets.h"
#include "shard/batch/batch.h"
#include "shard/gather/pooling.h"

namespace emberd::step {

// How often which counts were seen, in a few hundred buckets at most. Not thread-safe.
class CountSketch {
 public:
  void Add(int64_t count);
  v1::CountSketch ToProto() const;
  int64_t max() const { return max_; }
  // Largest count of the bucket of `count` >= 0: itself up to 16, then at most 1/8 more.
  static int64_t Upper(int64_t count);

 private:
  int64_t max_ = 0;
  std::map<int64_t, int64_t> buckets_;  // by upper bound
};

// What the batches of a model needed, as counts from which limits can be set. Thread-safe.
class ObservedCounts {
 public:
  explicit ObservedCounts(size_t stacks) : stacks_(stacks) {}

  // `statistics` has the stacks of the plan. Of a refused batch, its needs count alone.
  void Observe(const v1::BatchStatistics& statistics, bool refused = false);
  // With the limits of `plan` as those of now.
  v1::GetLimitsResponse Limits(const preprocess::Plan& plan) const;
  // Totals, by stack, with the limits of `plan`; `model` is not set.
  std::vector<v1::StackStats> Stats(const preprocess::Plan& plan) const;

 private:
  struct Stack {
    CountSketch ids;
    CountSketch unique_ids;
    CountSketch ids_per_sample;
    CountSketch minibatches;
    v1::StackStats totals;  // of batches and ids
  };
  mutable absl::Mutex mutex_;
  std::vector<Stack> stacks_ ABSL_GUARDED_BY(mutex_);
};

// Features whose gradients did not come with an update, each named in the log once. Thread-safe.
class MissingGradients {
 public:
  explicit MissingGradients(int features) : named_(features) {}

  // Of one update; `given` by index in the config. Returns how many are missing.
  int64_t Observe(const v1::ModelConfig& config, const std::vector<bool>& given);

 private:
  std::vector<std::atomic<bool>> named_;
};

// The limits that a model was given while it was served.
struct LiveLimits {
  absl::Mutex mutex;
  internal::v1::ModelLimits newest ABSL_GUARDED_BY(mutex);
};

// Immutable once made, but for its counts and its limits.
struct ServedModel {
  uint64_t id = 0;
  uint64_t history = 0;             // of the rows: new with every declaration and reset
  v1::ModelConfig config;           // complete
  internal::v1::ServedRows serves;  // the checkpoint that its rows are and stay; empty: none
  preprocess::Plan plan;
  std::vector<shard::StackSpec> shard_stacks;  // the stacks of the plan, as shards keep them
  std::shared_ptr<preprocess::Preprocessor> preprocessor;  // refers to config and plan
  absl::flat_hash_map<std::string, int> features;          // name to index in config.features
  // By feature: the samples that one element of the first dimension of its activation stands for,
  // then the other dimensions.
  std::vector<std::vector<int64_t>> sample_shapes;
  absl::flat_hash_map<std::string, int> tables;  // name to index in config.tables
  ops::ModelMetrics* metrics = nullptr;
  std::shared_ptr<ObservedCounts> observed;
  std::shared_ptr<MissingGradients> missing_gradients;
  std::shared_ptr<LiveLimits> live_limits = std::make_shared<LiveLimits>();

  // Of batches that begin from now on, unless newer ones were set. Stacks that the plan does not
  // have are left out; those that are missing get the limits of the plan.
  void SetLimits(const internal::v1::ModelLimits& limits) const;
  internal::v1::ModelLimits LimitsNow() const {
    absl::MutexLock lock(&live_limits->mutex);
    return live_limits->newest;
  }
  // The plan with the limits of now.
  preprocess::Plan PlanNow() const;
  // Shape of the activation of a feature with so many samples, which CheckSamples has passed.
  std::vector<int64_t> ActivationShape(int feature, int64_t samples) const;

  bool read_only() const { return !serves.model().empty(); }
  // Counts a batch for metrics and limits.
  void Observe(const preprocess::PreprocessedBatch& batch) const;
  // Counts, and warns of, features that an update has no gradient for; `given` by index in the
  // config.
  void ObserveUpdate(const std::vector<bool>& given) const;
  const v1::TableConfig& TableOfFeature(int feature) const {
    return config.tables(tables.at(config.features(feature).table()));
  }
};

using ServedModelPtr = std::shared_ptr<const ServedModel>;

// FAILED_PRECONDITION if the model's tables have no optimizer, so that nothing can update them.
absl::Status CheckTrainable(const ServedModel& model);
// The same for a lookup, unless it is for inference.
absl::Status CheckInference(const ServedModel& model, bool inference);

// "clicks/step-100"; empty for a model that serves no checkpoint.
std::string ServesText(const internal::v1::ServedRows& serves);
// FAILED_PRECONDITION if the model serves a checkpoint, so that nothing can change it; `what` was
// to be done.
absl::Status CheckNotReadOnly(const ServedModel& model, const std::string& what);

// Plans a complete config; its history is not set. `cpu`: see Preprocessor.
absl::StatusOr<std::shared_ptr<ServedModel>> MakeServedModel(v1::ModelConfig config,
                                                             const preprocess::Topology& topology,
                                                             CpuPool* cpu, ops::Metrics* metrics);

// What a coordinator keeps of a batch between Lookup and ApplyGradients: which samples have entries
// on which shard.
struct KeptShard {
  uint64_t history = 0;
  // By stack: canonical samples that the shard returned, ascending.
  std::vector<std::vector<int32_t>> samples;
  // By stack: its entries, if it answered with unique rows; they name these by their places. Null:
  // it did not.
  std::vector<std::shared_ptr<const shard::StackEntries>> entries;
};

// Immutable.
struct KeptBatch {
  KeptBatch() = default;
  // What is to be kept of a batch; result i is shard i's.
  KeptBatch(ServedModelPtr served, const preprocess::PreprocessedBatch& batch,
            absl::Span<const host::GatherResult> results)
      : model(std::move(served)),
        feature_samples(batch.feature_samples().begin(), batch.feature_samples().end()),
        feature_sample_begin(batch.feature_sample_begin().begin(),
                             batch.feature_sample_begin().end()) {
    for (const host::GatherResult& result : results) {
      KeptShard& kept = shards.emplace_back();
      kept.history = result.history;
      for (const shard::StackSums& stack : result.stacks) {
        kept.samples.emplace_back(stack.samples.begin(), stack.samples.end());
        kept.entries.emplace_back(stack.later,
                                  stack.later == nullptr ? nullptr : &stack.later->entries());
      }
    }
  }

  ServedModelPtr model;
  std::vector<int64_t> feature_samples;       // by feature of the config
  std::vector<int64_t> feature_sample_begin;  // by feature: its first canonical sample in the stack
  std::vector<KeptShard> shards;
  bool tiny = false;  // as in PreparedLookup

  int64_t bytes() const {
    size_t bytes = sizeof(*this);
    for (const KeptShard& shard : shards) {
      for (const auto& samples : shard.samples) bytes += samples.size() * sizeof(int32_t);
      for (const auto& entries : shard.entries) bytes += entries == nullptr ? 0 : entries->bytes();
    }
    return static_cast<int64_t>(bytes);
  }
};

using BatchStore = rpc::HandleStore<const KeptBatch>;

}  // namespace emberd::step
