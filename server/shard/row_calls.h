// Calls of a shard with a single answer, and those of them that bring or take rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/ops/metrics.h"
#include "server/rpc/memory_budget.h"
#include "server/rpc/message.h"
#include "server/rpc/wire.h"
#include "server/shard/shard_host.h"
#include "shard/types.h"

namespace emberd::server {

class UnaryCall {
 public:
  UnaryCall(ShardHost* host, ops::Rpc rpc, grpc::ServerUnaryReactor* reactor,
            size_t request_bytes = 0)
      : reactor_(reactor), timer_(host->metrics(), rpc, static_cast<int64_t>(request_bytes)) {}

  void End(const absl::Status& status, size_t response_bytes = 0) {
    timer_.AddResponseBytes(static_cast<int64_t>(response_bytes));
    timer_.Finish(status.code());
    reactor_->Finish(rpc::ToGrpcStatus(status));
  }
  template <typename Response>
  void End(absl::StatusOr<Response> result, Response* response) {
    const absl::Status status = result.status();
    if (status.ok()) *response = *std::move(result);
    End(status);
  }

 private:
  grpc::ServerUnaryReactor* const reactor_;
  ops::RpcTimer timer_;
};

// One ReadRows or AssignRows: owns what the engine works on.
struct RowsCall : UnaryCall {
  using UnaryCall::UnaryCall;

  size_t floats() const { return partitions.size() * selection.columns; }

  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<float> values;
  shard::RowSelection selection;
  rpc::MemoryRoom room;
};

// INVALID_ARGUMENT names what is wrong, RESOURCE_EXHAUSTED what there is no room for.
absl::Status ReadRequest(const internal::v1::ReadShardRowsRequest& request,
                         const rpc::MessageLimits& limits, RowsCall* call);
absl::Status ReadRequest(const internal::v1::AssignShardRowsRequest& request,
                         const rpc::MessageLimits& limits, RowsCall* call);

}  // namespace emberd::server
