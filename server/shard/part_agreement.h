// Whether one rank's part of a group's step goes with those that are held.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "shard/engine.h"

namespace emberd::server {

// `held` are parts by rank that agree with each other; one without a batch has not come. Compares
// `part` of `rank` stack by stack with the first that has a say there. INVALID_ARGUMENT names rank,
// field and both values; NOT_FOUND: the model was dropped.
absl::Status CheckAgreement(absl::Span<const shard::ApplyPart> held, int rank,
                            const shard::ApplyPart& part);

}  // namespace emberd::server
