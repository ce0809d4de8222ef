// A health check that is always green, or that hangs with the process it asks, is worse than none:
// container engines would leave a dead process in service.
#include <string>

#include <gmock/gmock.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/launcher/verbs.h"
#include "server/ops/lifecycle.h"

namespace emberd::launcher {
namespace health_test {

using ::testing::HasSubstr;

TEST(CheckHealth, FollowsTheServer) {
  grpc::ServerBuilder builder;
  ops::EnableStandardServices(&builder);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  const auto server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const HealthOptions options = {.address = absl::StrCat("127.0.0.1:", port),
                                 .timeout = absl::Seconds(30)};
  ops::SetServing(server.get(), {}, true);
  EXPECT_TRUE(CheckHealth(options).ok()) << CheckHealth(options);
  ops::SetServing(server.get(), {}, false);
  const absl::Status draining = CheckHealth(options);
  EXPECT_TRUE(absl::IsUnavailable(draining)) << draining;
  EXPECT_THAT(draining.message(), HasSubstr(options.address));
  server->Shutdown();
  EXPECT_TRUE(absl::IsUnavailable(CheckHealth(options)));
}

TEST(CheckHealth, RefusesWhatIsNoAddress) {
  for (const char* bad : {"", "7400", "localhost", "a b:1"}) {
    const absl::Status status = CheckHealth({.address = bad});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr("--address")) << bad;
  }
}

// The system completes connections to a listening socket that nobody serves.
TEST(CheckHealth, DoesNotHangWithAProcessThatHangs) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_GE(listener, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  const absl::Status status =
      CheckHealth({.address = absl::StrCat("127.0.0.1:", ntohs(address.sin_port)),
                   .timeout = absl::Milliseconds(200)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
  close(listener);
}

}  // namespace health_test
}  // namespace emberd::launcher
