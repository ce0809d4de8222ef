// What a shard does, in a word or two: for tables of shards.
#pragma once

#include "absl/status/status.h"
#include "client/emberctl/output.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::emberctl {

// "ok", "DOWN", "RECOVERING 43%", "NO CHANGES" (its log cannot be written or read).
Cell StateOf(const v1::ShardStatus& shard);
// OK, or why the shard does not do all that it should. UNAVAILABLE: it does not answer, or is
// recovering.
absl::Status CheckShard(const v1::ShardStatus& shard);

}  // namespace emberd::emberctl
