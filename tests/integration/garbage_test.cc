// Bytes that are no request at all: on the port, and as the body of every method. A failure here
// means that a parser or a handler trusts what it reads: a process has died, a call hangs, or a
// table has moved.
#include "tests/testing/garbage.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/testing/seed.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "gtest/gtest.h"
#include "tests/integration/bad_cases.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace garbage_test {

// Sends `bytes` to a port and reads what comes back until the server hangs up or half a second
// passes.
void SendRaw(const std::string& address, const std::string& bytes) {
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval timeout{.tv_sec = 0, .tv_usec = 500'000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);  // the server may hang up in the middle
  char buffer[4096];
  while (recv(fd, buffer, sizeof(buffer), 0) > 0) {
  }
  close(fd);
}

constexpr absl::Duration kDeadline = absl::Minutes(2);

class GarbageTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = 2, .config = kStrictCluster}, StrictModel().DebugString());
    ASSERT_FALSE(HasFatalFailure());
    digest_ = TableDigest();
    pids_ = cluster_->pids();
  }

  // Same processes, same tables, and they work.
  void ExpectUnharmed() {
    EXPECT_EQ(cluster_->pids(), pids_);
    EXPECT_EQ(TableDigest(), digest_);
    const Api api(cluster_->address());
    v1::LookupRequest good = GoodLookup(model_.id);
    good.set_inference(true);
    v1::LookupResponse response;
    const grpc::Status status = Call(&v1::EmbeddingService::Stub::Lookup, api, good, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  std::mt19937 random_{static_cast<uint32_t>(TestSeed())};
  std::string digest_;
  std::vector<pid_t> pids_;
};

TEST_F(GarbageTest, BytesOnThePort) {
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const std::vector<std::string> kinds = {
      "",
      "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
      preface,
      preface.substr(0, 11),
      preface + RandomBytes(random_, 1000),
      // A frame that says it is 16 MiB long.
      preface + std::string("\xff\xff\xff\x00\x00\x00\x00\x00\x01", 9) + RandomBytes(random_, 100),
      RandomBytes(random_, 1),
      RandomBytes(random_, 100'000),
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + RandomBytes(random_, 500),
  };
  for (const std::string& address :
       {cluster_->address(), cluster_->shard_address(0), cluster_->http_address()}) {
    for (const std::string& bytes : kinds) SendRaw(address, bytes);
  }
  ExpectUnharmed();
}

// Every method of a coordinator and of a shard.
struct Method {
  std::string name;
  bool is_public = false;
  bool of_shard = false;
};
std::vector<Method> AllMethods() {
  std::vector<Method> methods;
  for (const char* method : {"DeclareModel", "DescribeModel", "Lookup", "ApplyGradients",
                             "ReleaseBatch", "ReadRows", "AssignRows", "ExportTable"}) {
    methods.push_back({absl::StrCat("/emberd.v1.EmbeddingService/", method), true});
  }
  methods.push_back({"/emberd.v1.AdminService/GetStatus"});
  for (const char* method :
       {"CreateModel", "Gather", "Apply", "ReleaseBatch", "ReadRows", "AssignRows", "GetStatus",
        "Join", "AllGather", "Advance", "Leave", "Watch"}) {
    methods.push_back({absl::StrCat("/emberd.internal.v1.ShardService/", method), false, true});
  }
  return methods;
}

TEST_F(GarbageTest, BytesAsTheBodyOfEveryMethod) {
  const Api coordinator(cluster_->address());
  const Api shard(cluster_->shard_address(0));
  internal::v1::ShardPlace place;  // as the cluster's own coordinator has it
  place.set_shards(2);
  place.set_sparsecores_per_shard(2);
  for (const Method& method : AllMethods()) {
    grpc::GenericStub stub(method.of_shard ? shard.channel : coordinator.channel);
    std::vector<std::string> bodies = {"", "\x0a", std::string(1, '\0'), std::string(64, '\xff'),
                                       std::string("\x0a\xff\xff\xff\xff\x0f", 6)};
    for (int i = 0; i < 20; ++i) bodies.push_back(RandomBytes(random_, random_() % 300));
    for (const std::string& body : bodies) {
      const grpc::StatusCode code = SendMessage(stub, method.name, body, kDeadline,
                                                method.of_shard ? place.SerializeAsString() : "");
      // The call came to the right shard, if not with a model of this cluster.
      if (!method.name.ends_with("CreateModel")) {
        EXPECT_NE(code, grpc::FAILED_PRECONDITION) << method.name;
      }
      EXPECT_NE(code, grpc::DEADLINE_EXCEEDED) << method.name;
      EXPECT_NE(code, grpc::UNAVAILABLE) << method.name;
      // What gRPC says by itself would send users looking for another server.
      if (method.is_public) {
        EXPECT_NE(code, grpc::UNIMPLEMENTED) << method.name;
      }
      // Only a request for the status may be empty.
      if (!method.name.ends_with("GetStatus")) {
        EXPECT_NE(code, grpc::OK) << method.name;
      }
    }
  }
  ExpectUnharmed();
}

// Nearly good requests get deeper than garbage does.
TEST_F(GarbageTest, DamagedLookups) {
  const Api api(cluster_->address());
  grpc::GenericStub stub(api.channel);
  v1::LookupRequest request = GoodLookup(model_.id);
  request.set_inference(true);
  const std::string good = request.SerializeAsString();
  EXPECT_EQ(SendMessage(stub, "/emberd.v1.EmbeddingService/Lookup", good, kDeadline), grpc::OK);
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(
        SendMessage(stub, "/emberd.v1.EmbeddingService/Lookup", good.substr(0, size), kDeadline),
        grpc::UNAVAILABLE);
  }
  for (int i = 0; i < 500; ++i) {
    std::string bad = good;
    const int flips = 1 + static_cast<int>(random_() % 3);
    for (int flip = 0; flip < flips; ++flip) {
      bad[random_() % bad.size()] ^= static_cast<char>(1 << random_() % 8);
    }
    const grpc::StatusCode code =
        SendMessage(stub, "/emberd.v1.EmbeddingService/Lookup", bad, kDeadline);
    EXPECT_NE(code, grpc::UNAVAILABLE);
    EXPECT_NE(code, grpc::DEADLINE_EXCEEDED);
    EXPECT_NE(code, grpc::INTERNAL);
  }
  ExpectUnharmed();
}

}  // namespace garbage_test
}  // namespace emberd::testing
