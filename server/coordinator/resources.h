// What the calls of a coordinator work with, whatever way they came. Coordinator owns it.
#pragma once

#include <string>

#include "absl/time/time.h"

namespace emberd::host {
class CollectiveRouter;
}  // namespace emberd::host
namespace emberd::ops {
class Metrics;
class ServerMetrics;
}  // namespace emberd::ops
namespace emberd::step {
class Mutations;
class ShardSet;
class StepPath;
}  // namespace emberd::step

namespace emberd::coordinator {

class Checkpoints;
class ModelRegistry;
class RowAccess;
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

}  // namespace emberd::coordinator
