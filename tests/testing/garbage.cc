#include "tests/testing/garbage.h"

#include <grpcpp/grpcpp.h>

#include "absl/time/clock.h"

namespace emberd::testing {

std::string RandomBytes(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

grpc::StatusCode SendMessage(grpc::GenericStub& stub, const std::string& method,
                             const std::string& message, absl::Duration deadline,
                             const std::string& place) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  context.set_wait_for_ready(
      true);  // gRPC 1.51 may take a connection that is on its way for a failed one
  if (!place.empty()) context.AddMetadata("emberd-shard-place-bin", place);
  grpc::CompletionQueue queue;
  const grpc::Slice slice(message);
  const grpc::ByteBuffer request(&slice, 1);
  auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  return status.error_code();
}

}  // namespace emberd::testing
