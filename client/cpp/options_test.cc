#include "client/cpp/options.h"

#include <cstdlib>
#include <functional>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace options_test {

ClientOptions GoodOptions() {
  ClientOptions options;
  options.addresses = {"127.0.0.1:7400", "[::1]:7400"};
  return options;
}

TEST(ClientOptionsTest, DefaultsAreValidButForTheAddress) {
  EXPECT_TRUE(GoodOptions().Validate().ok()) << GoodOptions().Validate();
  EXPECT_FALSE(ClientOptions().Validate().ok());
}

TEST(ClientOptionsTest, NamesTheFieldThatIsWrong) {
  const struct {
    const char* message;
    std::function<void(ClientOptions*)> spoil;
  } cases[] = {
      {"addresses: an empty list", [](ClientOptions* o) { o->addresses.clear(); }},
      {"addresses[1]: \"host\"", [](ClientOptions* o) { o->addresses[1] = "host"; }},
      {"addresses[0]: \":1\"", [](ClientOptions* o) { o->addresses[0] = ":1"; }},
      {"addresses[0]: \"host:\"", [](ClientOptions* o) { o->addresses[0] = "host:"; }},
      {"addresses[0]: \"127.0.0.1:99999\" is not allowed; it must be \"host:port\" with a port in "
       "[1, 65535]",
       [](ClientOptions* o) { o->addresses[0] = "127.0.0.1:99999"; }},
      {"addresses[1]: \"127.0.0.1:0\"", [](ClientOptions* o) { o->addresses[1] = "127.0.0.1:0"; }},
      {"deadline: 0", [](ClientOptions* o) { o->deadline = absl::ZeroDuration(); }},
      {"deadline: inf", [](ClientOptions* o) { o->deadline = absl::InfiniteDuration(); }},
      {"connect_timeout: -1s", [](ClientOptions* o) { o->connect_timeout = -absl::Seconds(1); }},
      {"initial_backoff: 0", [](ClientOptions* o) { o->initial_backoff = absl::ZeroDuration(); }},
      {"max_backoff: 1ms is not allowed; it must be >= initial_backoff (50ms)",
       [](ClientOptions* o) { o->max_backoff = absl::Milliseconds(1); }},
      {"max_attempts: 0", [](ClientOptions* o) { o->max_attempts = 0; }},
      {"jitter: 1.5", [](ClientOptions* o) { o->jitter = 1.5; }},
      {"jitter: nan",
       [](ClientOptions* o) { o->jitter = std::numeric_limits<double>::quiet_NaN(); }},
      {"token: a token together with token_file",
       [](ClientOptions* o) { o->token = o->token_file = "0123456789abcdef"; }},
      {"client_id: 65 bytes", [](ClientOptions* o) { o->client_id = std::string(65, 'x'); }},
  };
  for (const auto& [message, spoil] : cases) {
    ClientOptions options = GoodOptions();
    spoil(&options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(message));
  }
}

TEST(ClientOptionsTest, TheEnvironmentDecidesWhatTheOptionsLeaveOpen) {
  ClientOptions options = GoodOptions();
  const auto chosen = [&](const char* name) {
    setenv("EMBERD_TRANSPORT", name, /*replace=*/1);
    return options.ChosenTransport();
  };
  EXPECT_EQ(*chosen("TCP"), TransportKind::kTcp);
  EXPECT_EQ(*chosen("SHARED"), TransportKind::kShared);
  EXPECT_EQ(*chosen("AUTO"), TransportKind::kAuto);
  EXPECT_EQ(*chosen(""), TransportKind::kAuto);
  EXPECT_THAT(std::string(chosen("tcp").status().message()),
              ::testing::HasSubstr("EMBERD_TRANSPORT: \"tcp\" is not allowed"));
  EXPECT_EQ(options.Validate().code(), absl::StatusCode::kInvalidArgument);
  options.transport = TransportKind::kTcp;
  EXPECT_EQ(*chosen("SHARED"), TransportKind::kTcp);
  unsetenv("EMBERD_TRANSPORT");
}

}  // namespace options_test
}  // namespace emberd::client
