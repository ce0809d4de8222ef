// Calls of the CheckpointService that answer with progress. Internal to the client.
#pragma once

#include <google/protobuf/message_lite.h>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/transport.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::client {

// Runs a call of `method` to its end, as Transport::Call does. `progress` gets every message but
// the last, which is the result. Once a message has come the work has begun, and is not tried
// again. INTERNAL: the server ended the call too soon.
absl::StatusOr<v1::CheckpointProgress> RunWithProgress(
    Transport* transport, const char* method, const google::protobuf::MessageLite& request,
    absl::Duration deadline, absl::FunctionRef<void(const v1::CheckpointProgress&)> progress);

}  // namespace emberd::client
