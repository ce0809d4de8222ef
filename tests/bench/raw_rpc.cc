#include "tests/bench/raw_rpc.h"

#include <cstring>
#include <string>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/rpc/status_codes.h"

namespace emberd::bench {
namespace {

// Any method: reads one message, writes the prepared one.
class RawService final : public grpc::CallbackGenericService {
 public:
  explicit RawService(int64_t response_bytes)
      : memory_(response_bytes, 'x'),
        slice_(memory_.data(), memory_.size(), grpc::Slice::STATIC_SLICE) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    class Reactor final : public grpc::ServerGenericBidiReactor {
     public:
      explicit Reactor(grpc::Slice* slice) : response_(slice, 1) { StartRead(&request_); }

     private:
      void OnReadDone(bool) override { StartWriteAndFinish(&response_, {}, grpc::Status::OK); }
      void OnDone() override { delete this; }
      grpc::ByteBuffer request_;
      grpc::ByteBuffer response_;
    };
    return new Reactor(&slice_);
  }

 private:
  const std::string memory_;
  grpc::Slice slice_;
};

class RawRpcImpl final : public RawRpc {
 public:
  explicit RawRpcImpl(int64_t response_bytes)
      : service_(response_bytes), received_(response_bytes) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterCallbackGenericService(&service_);
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = std::make_unique<grpc::GenericStub>(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials(), arguments));
  }
  bool started() const { return server_ != nullptr && port_ != 0; }

  absl::Status Call(int64_t request_bytes) override {
    sent_.resize(request_bytes, 'y');
    grpc::Slice slice(sent_.data(), sent_.size(), grpc::Slice::STATIC_SLICE);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    absl::Notification done;
    grpc::Status status;
    stub_->UnaryCall(&context, "/raw/Call", grpc::StubOptions(), &request, &response,
                     [&](grpc::Status result) {
                       status = std::move(result);
                       done.Notify();
                     });
    done.WaitForNotification();
    if (!status.ok()) return rpc::FromGrpcStatus(status);
    std::vector<grpc::Slice> slices;
    if (!response.Dump(&slices).ok()) return absl::InternalError("the answer cannot be read");
    char* to = received_.data();
    for (const grpc::Slice& part : slices) {
      std::memcpy(to, part.begin(), part.size());
      to += part.size();
    }
    return absl::OkStatus();
  }

 private:
  RawService service_;
  std::vector<char> received_;
  std::string sent_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::GenericStub> stub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RawRpc>> RawRpc::Start(int64_t response_bytes) {
  auto raw = std::make_unique<RawRpcImpl>(response_bytes);
  if (!raw->started()) return absl::UnavailableError("no port of 127.0.0.1 can be bound");
  return raw;
}

}  // namespace emberd::bench
