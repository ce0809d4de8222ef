// Calls of the CheckpointService that answer with progress. Internal to the client.
#pragma once

#include <memory>

#include <grpcpp/grpcpp.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/coordinator.h"
#include "client/cpp/transport.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"

namespace emberd::client {

using ProgressReader = std::unique_ptr<grpc::ClientReader<v1::CheckpointProgress>>;

// Reads a call to its end. `call` runs an attempt as Transport::Call does, `begin` begins the call,
// `progress` gets every message but the last, which is the result. Once a message has come the work
// has begun, and is not tried again. INTERNAL: the server ended the call too soon.
absl::StatusOr<v1::CheckpointProgress> RunWithProgress(
    absl::FunctionRef<absl::Status(Transport::Attempt)> call,
    absl::FunctionRef<ProgressReader(const Coordinator&, grpc::ClientContext*)> begin,
    absl::FunctionRef<void(const v1::CheckpointProgress&)> progress);

}  // namespace emberd::client
