#include "server/security/testing/echo_server.h"

#include <chrono>

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "server/security/security.h"

namespace emberd::security {
namespace {

constexpr auto kDeadline = std::chrono::seconds(30);

class Reactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Reactor(const std::string& name) { Finish({grpc::StatusCode::ABORTED, name}); }
  void OnDone() override { delete this; }
};

}  // namespace

EchoServer::EchoServer(const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", credentials, &port);
  builder.RegisterCallbackGenericService(this);
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

EchoServer::~EchoServer() {
  if (server_ != nullptr) server_->Shutdown();
}

grpc::ServerGenericBidiReactor* EchoServer::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  return new Reactor(ClientName(*context));
}

grpc::Status CallMethod(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const std::pair<std::string, std::string>& metadata) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  if (!metadata.first.empty()) context.AddMetadata(metadata.first, metadata.second);
  grpc::CompletionQueue queue;
  const grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  grpc::Status status;
  auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

}  // namespace emberd::security
