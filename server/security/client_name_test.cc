#include "server/security/client_name.h"

#include <memory>
#include <string>

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace emberd::security {
namespace {

TEST(ClientNameTest, PeersLoseTheirPort) {
  EXPECT_EQ(PeerAddress("ipv4:127.0.0.1:7400"), "127.0.0.1");
  EXPECT_EQ(PeerAddress("ipv4:127.0.0.1:7401"), "127.0.0.1");
  EXPECT_EQ(PeerAddress("ipv6:[::1]:7400"), "::1");
  EXPECT_EQ(PeerAddress("ipv6:%5B::1%5D:7400"), "::1");
  EXPECT_EQ(PeerAddress("ipv6:%5Bfe80::1%25eth0%5D:7400"), "fe80::1%eth0");
}

TEST(ClientNameTest, WhatIsNoAddressIsStillAName) {
  EXPECT_EQ(PeerAddress("unix:/run/emberd"), "unix:/run/emberd");
  EXPECT_EQ(PeerAddress(""), "unknown");
  for (const char* odd : {"ipv4:", "ipv4:1", "ipv6:", "ipv6:]:[", "ipv6:::1", ":", "ipv6:%5B"}) {
    PeerAddress(odd);  // does not fail
  }
}

// Answers every call with the name of its client.
class NamingService final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    class Reactor final : public grpc::ServerGenericBidiReactor {
     public:
      explicit Reactor(const std::string& name) { Finish({grpc::StatusCode::ABORTED, name}); }
      void OnDone() override { delete this; }
    };
    return new Reactor(ClientName(*context));
  }
};

class NameEveryone final : public grpc::AuthMetadataProcessor {
 public:
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata&, grpc::AuthContext* caller, OutputMetadata*,
                       OutputMetadata*) override {
    caller->AddProperty(kClientNameProperty, "trainers");
    return grpc::Status::OK;
  }
};

std::string NameSeenBy(const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  NamingService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", credentials, &port);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return "no server";
  const auto channel =
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  grpc::CompletionQueue queue;
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  grpc::Status status;
  auto call = stub.PrepareUnaryCall(&context, "/any.Service/Any", request, &queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status.error_message();
}

TEST(ClientNameTest, ACallWithoutATokenIsNamedByItsAddress) {
  EXPECT_EQ(NameSeenBy(grpc::InsecureServerCredentials()), "127.0.0.1");
}

TEST(ClientNameTest, ACallWithATokenIsNamedByIt) {
  const auto credentials = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  credentials->SetAuthMetadataProcessor(std::make_shared<NameEveryone>());
  EXPECT_EQ(NameSeenBy(credentials), "trainers");
}

}  // namespace
}  // namespace emberd::security
