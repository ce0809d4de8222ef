// The shards of a storage.directory in this process, where nobody can call them: to save and to
// restore their models.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pools.h"
#include "emberd/v1/cluster.pb.h"
#include "server/coordinator/coordinator.h"
#include "server/ops/metrics.h"
#include "server/shard/shard_backend.h"

namespace emberd::launcher {

struct SavedModel {
  std::string model;
  std::string checkpoint;
};

// Not thread-safe. It saves nothing by itself. Shards have the disk write what they log before the
// destructor returns (not with fsync NEVER).
class QuietCluster {
 public:
  // The shards of `cluster`, but so many, with as many partitions in all. Waits until they have
  // read their logs.
  static absl::StatusOr<std::unique_ptr<QuietCluster>> Start(v1::ClusterConfig cluster, int shards);

  // A checkpoint of each model that is trained. `stopped`, when it says so, ends it with CANCELLED.
  absl::StatusOr<std::vector<SavedModel>> SaveAll(const std::function<bool()>& stopped);
  absl::Status RestoreAll(const std::vector<SavedModel>& models,
                          const std::function<bool()>& stopped);

 private:
  explicit QuietCluster(int threads) : metrics_("up"), threads_(threads) {}
  absl::StatusOr<SavedModel> Save(const std::string& model, const std::function<bool()>& stopped);
  absl::Status Restore(const SavedModel& saved, const std::function<bool()>& stopped);

  ops::Metrics metrics_;
  ThreadPools threads_;
  std::vector<std::shared_ptr<server::ShardBackend>> shards_;
  std::unique_ptr<server::Coordinator> coordinator_;
};

}  // namespace emberd::launcher
