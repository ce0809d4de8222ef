// Commands and results of ShardBackend as long messages. Decoding trusts nothing: sizes and counts
// are checked here, values (rows, samples, order) by the engine.
#pragma once

#include "absl/status/statusor.h"
#include "server/rpc/message_stream.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// The payload of an outgoing message references the memory of the command or result.
rpc::OutgoingMessage EncodeGather(const GatherCommand& command);
rpc::OutgoingMessage EncodeGatherResult(const GatherResult& result);
rpc::OutgoingMessage EncodeApply(const ApplyCommand& command);

// INVALID_ARGUMENT names what does not fit. The result keeps the message's payload alive.
// `partitions`: row ends of each segment, SparseCores per shard.
absl::StatusOr<GatherCommand> DecodeGather(const rpc::IncomingMessage& message, int partitions);
absl::StatusOr<GatherResult> DecodeGatherResult(const rpc::IncomingMessage& message);
absl::StatusOr<ApplyCommand> DecodeApply(const rpc::IncomingMessage& message);

// The place of a part in its group's step; what comes from elsewhere than DecodeApply was checked
// there before.
internal::v1::GroupPart GroupPartToProto(const GroupPart& part);
GroupPart GroupPartOf(const internal::v1::GroupPart& part);

}  // namespace emberd::server
