#include "server/security/transport_security.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::security {
namespace transport_security_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(BindRuleTest, OnlyLoopbackUnlessClosedOrAskedFor) {
  for (const char* address : {"127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(CheckBindAllowed("f", address, Protection::kNone, false).ok()) << address;
  }
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example:1"}) {
    for (const Protection protection : {Protection::kNone, Protection::kEncrypted}) {
      const absl::Status status = CheckBindAllowed("shards[1].address", address, protection, false);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
      EXPECT_THAT(std::string(status.message()), StartsWith("shards[1].address: "));
      EXPECT_TRUE(CheckBindAllowed("f", address, protection, true).ok()) << address;
    }
    EXPECT_TRUE(CheckBindAllowed("f", address, Protection::kClosed, false).ok()) << address;
  }
  for (const char* address : {"", "127.0.0.1", "[::1]", ":80", "127.0.0.1:65536"}) {
    EXPECT_FALSE(CheckBindAllowed("f", address, Protection::kClosed, true).ok()) << address;
  }
}

TEST(BindRuleTest, SaysWhatIsMissing) {
  const auto message = [](Protection protection) {
    return std::string(CheckBindAllowed("f", "0.0.0.0:1", protection, false).message());
  };
  EXPECT_THAT(message(Protection::kNone), HasSubstr("traffic is not encrypted"));
  EXPECT_THAT(message(Protection::kEncrypted), HasSubstr("anybody may call"));
}

TEST(BindRuleTest, TlsClosesAPortOnlyTogetherWithCertificatesOrTokens) {
  v1::SecurityConfig security;
  EXPECT_EQ(ProtectionOf(security), Protection::kNone);
  security.set_tokens_file("t");
  EXPECT_EQ(ProtectionOf(security), Protection::kNone);
  security.mutable_tls();
  EXPECT_EQ(ProtectionOf(security), Protection::kClosed);
  security.clear_tokens_file();
  EXPECT_EQ(ProtectionOf(security), Protection::kEncrypted);
  security.mutable_tls()->set_require_client_certificate(true);
  EXPECT_EQ(ProtectionOf(security), Protection::kClosed);
}

}  // namespace transport_security_test
}  // namespace emberd::security
