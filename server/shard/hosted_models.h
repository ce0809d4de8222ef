// The models that one shard holds: their configs, what its engine must know of them, and where
// their work is counted.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/plan/plan.h"
#include "server/ops/metrics.h"
#include "shard/engine.h"
#include "shard/types.h"

namespace emberd::server {

// From a plan of the whole cluster to what one shard's engine must know. `config` is complete and
// `plan` was made from it.
shard::ModelSpec ModelSpecFromPlan(uint64_t model_id, const v1::ModelConfig& config,
                                   const preprocess::Plan& plan, int shard_index);

// Where a shard stands in its cluster.
struct ShardPlace {
  int shards = 1;
  int sparsecores_per_shard = 1;
  int index = 0;
};

// Thread-safe. What the calls mean and their errors: shard_service.proto.
class HostedModels {
 public:
  // `engine` and `metrics` must outlive it.
  HostedModels(const ShardPlace& place, shard::Engine* engine, ops::Metrics* metrics)
      : place_(place), engine_(engine), metrics_(metrics) {}

  // True: it was not here before.
  absl::StatusOr<bool> Create(const internal::v1::CreateModelRequest& request);
  absl::StatusOr<internal::v1::FindModelResponse> Find(
      const internal::v1::FindModelRequest& request) const;
  // Here and in the engine. `forget_rest` runs before anybody can create the model again.
  absl::Status Drop(uint64_t model_id, absl::FunctionRef<void()> forget_rest);

  bool Has(uint64_t model_id) const { return MetricsOf(model_id) != nullptr; }
  // Null for a model that is not here.
  ops::ShardModelMetrics* MetricsOf(uint64_t model_id) const;

 private:
  struct Model {
    v1::ModelConfig config;
    ops::ShardModelMetrics* metrics = nullptr;
  };

  absl::Status CheckPlace(const internal::v1::CreateModelRequest& request) const;
  absl::Status CheckName(const v1::ModelConfig& config) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardPlace place_;
  shard::Engine* const engine_;
  ops::Metrics* const metrics_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Model> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
