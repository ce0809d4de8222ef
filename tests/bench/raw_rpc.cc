#include "tests/bench/raw_rpc.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/rpc/wire.h"
#include "tests/bench/raw_relay.h"

namespace emberd::bench {
namespace {

constexpr int64_t kMessageBytes = 1 << 20;

// The first message of a call: how many bytes each side is to send.
struct Order {
  int64_t down = 0;
  int64_t up = 0;
};

// A message of 1 MiB, or less, out of memory that stays.
grpc::ByteBuffer Message(int64_t bytes) {
  static const std::string* const memory = new std::string(kMessageBytes, 'x');
  grpc::Slice slice(memory->data(), std::min(bytes, kMessageBytes), grpc::Slice::STATIC_SLICE);
  return grpc::ByteBuffer(&slice, 1);
}

class Origin final : public grpc::ServerGenericBidiReactor {
 public:
  Origin() { StartRead(&incoming_); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (!ordered_) {
      grpc::Slice slice;
      if (incoming_.DumpToSingleSlice(&slice).ok() && slice.size() == sizeof(order_)) {
        std::memcpy(&order_, slice.begin(), sizeof(order_));
      }
      ordered_ = true;
    } else {
      order_.up -= static_cast<int64_t>(incoming_.Length());
    }
    incoming_.Clear();
    if (order_.up > 0) {
      StartRead(&incoming_);
    } else {
      WriteNext();
    }
  }
  void OnWriteDone(bool ok) override {
    if (ok) WriteNext();
  }
  void OnDone() override { delete this; }
  void WriteNext() {
    if (order_.down <= 0) {
      Finish(grpc::Status::OK);
      return;
    }
    outgoing_ = Message(order_.down);
    order_.down -= kMessageBytes;
    StartWrite(&outgoing_);
  }

  grpc::ByteBuffer incoming_, outgoing_;
  bool ordered_ = false;
  Order order_;
};

class OriginService final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Origin;
  }
};

// The client's end of one call; `received` has room for what comes.
class Call final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Call(grpc::GenericStub* stub, Order order, char* received) : to_(received), up_(order.up) {
    stub->PrepareBidiStreamingCall(&context_, "/raw/Call", grpc::StubOptions(), this);
    const grpc::Slice slice(&order, sizeof(order));
    outgoing_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&outgoing_);
    StartRead(&incoming_);
    StartCall();
  }
  absl::Status Wait() {
    done_.WaitForNotification();
    return rpc::FromGrpcStatus(status_);
  }

 private:
  void OnWriteDone(bool ok) override {
    if (!ok) return;
    if (up_ <= 0) {
      StartWritesDone();
      return;
    }
    outgoing_ = Message(up_);
    up_ -= kMessageBytes;
    StartWrite(&outgoing_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    std::vector<grpc::Slice> slices;
    if (!incoming_.Dump(&slices).ok()) context_.TryCancel();
    for (const grpc::Slice& slice : slices) {
      std::memcpy(to_, slice.begin(), slice.size());
      to_ += slice.size();
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    done_.Notify();
  }

  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_, outgoing_;
  char* to_;
  int64_t up_;
  grpc::Status status_;
  absl::Notification done_;
};

// A server and a stub for it.
class Hop {
 public:
  explicit Hop(std::unique_ptr<grpc::CallbackGenericService> service)
      : service_(std::move(service)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(service_.get());
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = std::make_unique<grpc::GenericStub>(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments));
  }
  bool started() const { return server_ != nullptr; }
  grpc::GenericStub* stub() { return stub_.get(); }

 private:
  std::unique_ptr<grpc::CallbackGenericService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::GenericStub> stub_;
};

class RawRpcImpl final : public RawRpc {
 public:
  explicit RawRpcImpl(bool relay) : origin_(std::make_unique<OriginService>()) {
    if (relay) relay_ = std::make_unique<Hop>(MakeRelay(origin_.stub()));
  }
  bool started() const { return origin_.started() && (relay_ == nullptr || relay_->started()); }

  absl::Status Receive(int64_t bytes) override { return Run({.down = bytes}); }
  absl::Status Send(int64_t bytes) override { return Run({.up = bytes}); }

 private:
  absl::Status Run(Order order) {
    received_.resize(std::max<size_t>(received_.size(), order.down));
    Call call(relay_ != nullptr ? relay_->stub() : origin_.stub(), order, received_.data());
    return call.Wait();
  }

  Hop origin_;
  std::unique_ptr<Hop> relay_;
  std::vector<char> received_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RawRpc>> RawRpc::Start(bool relay) {
  auto raw = std::make_unique<RawRpcImpl>(relay);
  if (!raw->started()) return absl::UnavailableError("no port of 127.0.0.1 can be bound");
  return raw;
}

}  // namespace emberd::bench
