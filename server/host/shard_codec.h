// What a coordinator and a shard send each other, as messages and back. The calls of a step, Gather
// and Apply, are long messages: the header of a message, its payload, wherever that lies, and the
// places that it names in memory that several processes share. ReadRows and AssignRows name rows
// one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/regions.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/host/shard_backend.h"
#include "server/rpc/budgets.h"
#include "server/rpc/message.h"
#include "shard/store/model.h"

namespace emberd::host {

// Gathers and their results as long messages. Decoding trusts nothing: sizes and counts are checked
// here, values (rows, samples, order) by the engine.

// Memory for the payload of an answer that both ends have. Empty: there is none.
struct AnswerRoom {
  std::shared_ptr<char> memory;
  uint64_t size = 0;
};
// What a caller offers. Empty if it offers none, or in a region that is not known here (any more):
// the payload is sent then. INVALID_ARGUMENT if the place is not inside of its region.
absl::StatusOr<AnswerRoom> FindAnswerRoom(const RegionServer* regions,
                                          const v1::SharedBlock& place);

// The payload of an outgoing message references the memory of the command or result.
rpc::OutgoingMessage EncodeGather(const GatherCommand& command);
// With the payload in `room`, if it fits there.
rpc::OutgoingMessage EncodeGatherResult(const GatherResult& result, const AnswerRoom& room = {});

// INVALID_ARGUMENT names what does not fit. The result keeps the message's payload alive.
// `partitions`: SparseCores per shard; each segment has so many row ends. `regions`: where a
// payload may lie instead of in the message; FAILED_PRECONDITION if it lies in none of them. It is
// copied from there within `limits` before it is looked at.
absl::StatusOr<GatherCommand> DecodeGather(const rpc::IncomingMessage& message, int partitions,
                                           const RegionServer* regions = nullptr,
                                           const rpc::MessageLimits& limits = {});
// `room`: what was offered for the answer.
absl::StatusOr<GatherResult> DecodeGatherResult(const rpc::IncomingMessage& message,
                                                const AnswerRoom& room = {});

// Applies as long messages, decoded with as little trust.

// The payload of the message references the memory of the command.
rpc::OutgoingMessage EncodeApply(const ApplyCommand& command);

// INVALID_ARGUMENT names what does not fit. The result keeps the message's payload alive.
// `regions`: where a payload may lie instead of in the message, and is read; FAILED_PRECONDITION if
// it lies in none of them.
absl::StatusOr<ApplyCommand> DecodeApply(const rpc::IncomingMessage& message,
                                         const RegionServer* regions);

// Rows that are named one by one. The log keeps of an assignment the request that brought it,
// without its mutation.

// A selection of rows with what it points to.
struct NamedRows {
  rpc::MemoryRoom room;  // in which it lies; none: nobody counts
  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<float> values;  // [rows, columns]
  shard::RowSelection selection;

  size_t floats() const { return partitions.size() * selection.columns; }
};

internal::v1::ReadShardRowsRequest EncodeRead(const shard::RowSelection& selection);
// INVALID_ARGUMENT names what is wrong, here and below. Without values.
absl::Status DecodeRead(const internal::v1::ReadShardRowsRequest& request, NamedRows* rows);

// Both without its mutation. The command owns what it points to, and `room`.
internal::v1::AssignShardRowsRequest EncodeAssign(const AssignCommand& command);
absl::StatusOr<AssignCommand> DecodeAssign(const internal::v1::AssignShardRowsRequest& request,
                                           rpc::MemoryRoom room = {});

}  // namespace emberd::host
