// What the calls of one coordinator share.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "server/coordinator/fanout.h"
#include "server/coordinator/kept_batch.h"
#include "server/coordinator/model_registry.h"
#include "server/group/collective_router.h"
#include "server/ops/metrics.h"

namespace emberd::server {

struct CoordinatorResources {
  std::string coordinator;  // one string per life of the process
  ModelRegistry* registry = nullptr;
  Fanout* fanout = nullptr;
  BatchStore* batches = nullptr;
  CollectiveRouter* collective = nullptr;
  ops::Metrics* metrics = nullptr;
  int64_t max_message_bytes = 0;
  absl::Duration batch_ttl;
  absl::Duration shard_call;
  absl::Duration slow_step;  // steps that take longer are logged
};

}  // namespace emberd::server
