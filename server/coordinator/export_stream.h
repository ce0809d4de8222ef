// One ExportTable call: parts are made on the worker pool, one ahead of none, so that a slow reader
// costs one part.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"

namespace emberd::server {

// Deletes itself when the call is over.
class ExportStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  static ExportStream* Start(Coordinator* coordinator, const CallEnvironment& environment,
                             const grpc::CallbackServerContext& server_context,
                             const grpc::ByteBuffer& request);

 private:
  ExportStream(Coordinator* coordinator, const CallEnvironment& environment,
               const grpc::CallbackServerContext& server_context, const grpc::ByteBuffer& request);

  absl::Status Admit(const std::string& client);
  void SubmitNext();
  void MakeNext();
  void End(const absl::Status& status);
  void OnWriteDone(bool ok) override;
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  Coordinator* const coordinator_;
  const CallEnvironment environment_;
  const grpc::ByteBuffer request_;
  rpc::CallContext context_;
  ops::RpcTimer timer_;
  Admission::Grant grant_;
  // Making and writing take turns, so these are touched by one thread at a time.
  std::unique_ptr<Coordinator::Export> export_;
  grpc::ByteBuffer part_;
};

}  // namespace emberd::server
