// An assignment of rows as bytes, and back: what the log keeps of it is the request that brought it
// (AssignShardRowsRequest in shard_service.proto), without its mutation.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

std::string EncodeAssign(const AssignCommand& command);
// The command owns what it points to. INVALID_ARGUMENT: these are not the bytes of an assignment.
absl::StatusOr<AssignCommand> DecodeAssign(absl::Span<const char> bytes);

}  // namespace emberd::server
