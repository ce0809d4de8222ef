// Rows that are named one by one, as messages and back: what ReadRows and AssignRows ask of a
// shard. The log keeps of an assignment the request that brought it, without its mutation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/host/shard_backend.h"
#include "server/rpc/memory_budget.h"
#include "shard/types.h"

namespace emberd::host {

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
