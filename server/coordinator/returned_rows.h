// Whether shards that came back from their logs have made the same changes of a model as the
// others. After a loss of power they may not: each disk may lack the newest records of a log, and
// how many is different from disk to disk (storage.fsync).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/coordinator/shard_set.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// Empty: they have. Else what one shard has made and another one has lost: it neither made it nor
// holds it, so that nobody can finish it. Trainers may be at work meanwhile. An error: that cannot
// be known now.
absl::StatusOr<std::string> FindLostChange(const ShardSet& shards, uint64_t model_id,
                                           uint64_t history, rpc::CallContext* context);

}  // namespace emberd::server
