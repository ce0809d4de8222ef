// Applies as long messages. Decoding trusts nothing: sizes and counts are checked here, values by
// the engine.
#pragma once

#include "absl/status/statusor.h"
#include "base/region_server.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/rpc/message.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// The payload of the message references the memory of the command.
rpc::OutgoingMessage EncodeApply(const ApplyCommand& command);

// INVALID_ARGUMENT names what does not fit. The result keeps the message's payload alive.
// `regions`: where a payload may lie instead of in the message, and is read; FAILED_PRECONDITION if
// it lies in none of them.
absl::StatusOr<ApplyCommand> DecodeApply(const rpc::IncomingMessage& message,
                                         const RegionServer* regions);

// The place of a part in its group's step; what comes from elsewhere than DecodeApply was checked
// there before.
internal::v1::GroupPart GroupPartToProto(const GroupPart& part);
GroupPart GroupPartOf(const internal::v1::GroupPart& part);

}  // namespace emberd::server
