// What the calls of a coordinator work with, whatever way they came: resources, which Coordinator
// owns, and the environment of a service, which its server owns.
#pragma once

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace emberd {
class TaskQueue;
}  // namespace emberd
namespace emberd::host {
class CollectiveRouter;
}  // namespace emberd::host
namespace emberd::ops {
class Metrics;
class ServerMetrics;
}  // namespace emberd::ops
namespace emberd::rpc {
class Admission;
}  // namespace emberd::rpc
namespace emberd::step {
class Mutations;
class ShardSet;
class StepPath;
}  // namespace emberd::step

namespace emberd::coordinator {

class Checkpoints;
class ModelRegistry;
class RowAccess;
class StreamWatch;
class UnarySteps;

struct CoordinatorResources {
  std::string identity;  // one string per life of the process
  const step::ShardSet* shards = nullptr;
  ModelRegistry* registry = nullptr;
  step::Mutations* mutations = nullptr;
  step::StepPath* path = nullptr;
  UnarySteps* steps = nullptr;
  RowAccess* rows = nullptr;
  Checkpoints* checkpoints = nullptr;
  host::CollectiveRouter* collective = nullptr;
  ops::Metrics* metrics = nullptr;
  ops::ServerMetrics* server_metrics = nullptr;
  absl::Duration shard_call;  // time for what is asked of shards
  absl::Duration slow_step;   // steps that take longer are logged
};

// What the calls of one service share.
struct CallEnvironment {
  TaskQueue* queue = nullptr;
  // What sets queue->max_queued(), for errors.
  absl::string_view waiting_limit = "budgets.max_waiting_requests";
  rpc::Admission* admission = nullptr;
  const std::atomic<bool>* draining = nullptr;  // nothing new is taken; null: everything always is
  ops::ServerMetrics* metrics = nullptr;
  absl::Duration default_deadline;  // for callers that send none
  absl::Duration slow_call;         // calls that take longer are logged
  StreamWatch* streams = nullptr;   // ends those that nobody reads; null: nothing does
};

// For what is new while a coordinator drains. Clients that know of another one turn to it on this
// code.
inline absl::Status DrainingError() {
  return absl::UnavailableError("the coordinator is draining; use another one");
}

}  // namespace emberd::coordinator
