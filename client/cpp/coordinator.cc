#include "client/cpp/coordinator.h"

namespace emberd::client {

absl::StatusOr<v1::CheckpointProgress> RunWithProgress(
    Transport* transport, const google::protobuf::Message& request, absl::Duration deadline,
    absl::FunctionRef<void(const v1::CheckpointProgress&)> progress) {
  v1::CheckpointProgress last;
  grpc::Status end;  // of a call that had begun to answer
  const absl::Status status = transport->Call(
      {deadline}, [&](const Coordinator& coordinator, grpc::ClientContext* context) {
        const auto reader = coordinator.Read<v1::CheckpointProgress>(request, context);
        bool begun = false;
        while (reader->Read(&last)) {
          begun = true;
          if (!last.done()) progress(last);
        }
        const grpc::Status status = reader->Finish();
        if (!begun) return status;
        end = status;
        return grpc::Status::OK;
      });
  if (!status.ok()) return status;
  if (!end.ok()) return ToAbslStatus(end);
  if (!last.done()) return absl::InternalError("the server ended the call without a result");
  return last;
}

}  // namespace emberd::client
