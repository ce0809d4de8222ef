// Forgetting a group of trainers whose run is over, on all shards.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "emberd/v1/admin_service.pb.h"
#include "server/coordinator/fanout.h"
#include "server/coordinator/served_model.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// See AdminService.DropGroup. A step that was left half done is finished, or given up, first.
absl::StatusOr<v1::DropGroupResponse> DropGroup(const ServedModel& model, const std::string& group,
                                                Fanout* fanout, rpc::CallContext* context);

}  // namespace emberd::server
