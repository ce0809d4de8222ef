// Where changes of a model's rows wait while a checkpoint's moment is fixed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// Thread-safe. Must outlive its passes.
class ChangeGate {
 public:
  // Held by a change that has come in, until it is voted on or refused.
  using Pass = std::shared_ptr<const void>;
  using Go = std::function<void(Pass)>;

  // Calls `go` now, or when no pause holds the change back any more. `part`: of a group's step.
  void Enter(uint64_t model_id, const std::optional<GroupPart>& part, Go go);

  // See PauseChanges in shard_service.proto. Returns how many changes are in.
  absl::StatusOr<int> Pause(const internal::v1::PauseChangesRequest& request);
  void Resume(uint64_t model_id, uint64_t pause_id);
  // Whether the pause still holds back all changes, and none is in.
  bool Closed(uint64_t model_id, uint64_t pause_id);
  // Ends pauses that were not renewed.
  void Sweep(absl::Time now);

 private:
  struct Waiting {
    std::optional<GroupPart> part;
    Go go;
  };
  struct Gate {
    int entered = 0;
    uint64_t pause_id = 0;  // 0: open
    absl::Time until;
    std::string group;  // empty: of all changes
    int64_t after_step = 0;
    std::vector<Waiting> waiting;
  };

  static bool HoldsBack(const Gate& gate, const std::optional<GroupPart>& part);
  Pass MakePass(uint64_t model_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(uint64_t model_id);
  // Ends the pause, and takes out whoever has waited.
  std::vector<Waiting> Open(Gate* gate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LetIn(uint64_t model_id, std::vector<Waiting> waiting);

  Mutex mutex_;
  absl::flat_hash_map<uint64_t, Gate> gates_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
