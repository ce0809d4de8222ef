// The models that a coordinator serves. It remembers plans, not state: a model that another
// coordinator declared, or that this one knew before a restart, is found again on the shards.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/thread_pools.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/served_model.h"
#include "server/rpc/call_context.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

struct ModelRegistryOptions {
  preprocess::Topology topology;
  ThreadPools* threads = nullptr;  // required; must outlive the registry and its models
  ops::Metrics* metrics = nullptr;
};

// Thread-safe. One declaration runs at a time.
class ModelRegistry {
 public:
  ModelRegistry(std::vector<std::shared_ptr<ShardBackend>> shards, ModelRegistryOptions options);

  struct Declared {
    std::shared_ptr<const ServedModel> model;
    bool created = false;
  };
  // Makes the model on all shards, or on none: shards that followed before another failed are
  // undone.
  absl::StatusOr<Declared> Declare(v1::ModelConfig config, rpc::CallContext* context);

  // NOT_FOUND if no shard has it; UNAVAILABLE if none can be asked.
  absl::StatusOr<std::shared_ptr<const ServedModel>> Find(uint64_t model_id,
                                                          rpc::CallContext* context);
  absl::StatusOr<std::shared_ptr<const ServedModel>> FindByName(const std::string& name,
                                                                rpc::CallContext* context);

  // Makes a known model on a shard that lost it by restarting.
  absl::Status Restore(const ServedModel& model, int shard, rpc::CallContext* context);

  // By name.
  std::vector<std::shared_ptr<const ServedModel>> models() const;

 private:
  internal::v1::CreateModelRequest CreateRequest(const ServedModel& model, int shard) const;
  absl::StatusOr<Declared> CreateOnShards(std::shared_ptr<const ServedModel> model,
                                          rpc::CallContext* context);
  // What ALREADY_EXISTS should say: the first field that differs from what is there.
  absl::Status DescribeConflict(const ServedModel& model, const absl::Status& conflict,
                                rpc::CallContext* context);
  absl::StatusOr<std::shared_ptr<const ServedModel>> FindOnShards(
      const internal::v1::FindModelRequest& request, rpc::CallContext* context);
  std::shared_ptr<const ServedModel> Known(uint64_t model_id) const;

  const std::vector<std::shared_ptr<ShardBackend>> shards_;
  const ModelRegistryOptions options_;
  absl::Mutex declaring_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<const ServedModel>> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
