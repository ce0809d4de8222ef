// A gRPC server that answers any method: what tests of this folder share.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

namespace emberd::security {

// Listens on 127.0.0.1 with the given credentials. Ends every call that reaches it with ABORTED and
// ClientName as the message.
class EchoServer final : private grpc::CallbackGenericService {
 public:
  explicit EchoServer(const std::shared_ptr<grpc::ServerCredentials>& credentials);
  ~EchoServer() override;

  const std::string& address() const { return address_; }

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// How a unary call of `method` ends. `metadata`: key and value, if the key is not empty.
grpc::Status CallMethod(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const std::pair<std::string, std::string>& metadata = {});

}  // namespace emberd::security
