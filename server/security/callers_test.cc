#include <memory>
#include <string>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "base/sha256.h"
#include "config/config.h"
#include "server/security/security.h"
#include "server/security/testing/echo_server.h"
#include "server/security/testing/tokens.h"

namespace emberd::security {
namespace callers_test {

TEST(TokenTableTest, FindsEachTokenAndNothingElse) {
  const TokenTable table(TestTokens());
  for (const v1::Token::Role role : kAllRoles) {
    const Caller* const caller = table.Find(TokenOf(role));
    ASSERT_NE(caller, nullptr);
    EXPECT_EQ(caller->role, role);
    EXPECT_EQ(TokenOf(role), "the-token-of-" + caller->name);
  }
  for (const char* other : {"", "the-token-of-", "the-token-of-reader ", "THE-TOKEN-OF-READER"}) {
    EXPECT_EQ(table.Find(other), nullptr) << other;
  }
}

// The digest is what a leaked token file shows: it must not open anything.
TEST(TokenTableTest, ADigestIsNoToken) {
  const v1::TokenFile file = TestTokens();
  const TokenTable table(file);
  EXPECT_EQ(table.Find(file.tokens(0).sha256()), nullptr);
  const Sha256Digest bytes = Sha256("the-token-of-" + file.tokens(0).name());
  EXPECT_EQ(table.Find({reinterpret_cast<const char*>(bytes.data()), bytes.size()}), nullptr);
}

TEST(TokenTableTest, ReadsHeaders) {
  EXPECT_EQ(BearerToken("Bearer abc"), "abc");
  EXPECT_EQ(BearerToken("bearer   abc "), "abc");
  for (const char* header : {"", "Bearer", "Bearer ", "Bearerabc", "Basic abc", "abc"}) {
    EXPECT_EQ(BearerToken(header), "") << header;
  }
  EXPECT_EQ(BasicPassword("Basic " + absl::Base64Escape("me:abc:d")), "abc:d");
  EXPECT_EQ(BasicPassword("basic " + absl::Base64Escape(":abc")), "abc");
  for (const std::string& header :
       {std::string(), std::string("Basic"), std::string("Basic ?"), std::string("Bearer abc"),
        "Basic " + absl::Base64Escape("abc"), "Basic " + absl::Base64Escape("me:")}) {
    EXPECT_EQ(BasicPassword(header), "") << header;
  }
}

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

// Two tokens on one connection: gRPC shares an AuthContext between them, so that a name in it would
// be that of whoever called first.
TEST(ClientNameTest, ACallIsNamedByItsOwnTokenElseByItsAddress) {
  NameClientsBy(std::make_shared<const TokenTable>(TestTokens()));
  const EchoServer server(grpc::InsecureServerCredentials());
  const auto channel = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
  const auto name = [&](const std::string& header) {
    return CallMethod(channel, "/any.Service/Any", {header.empty() ? "" : "authorization", header})
        .error_message();
  };
  EXPECT_EQ(name(""), "127.0.0.1");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(name(Bearer(v1::Token::READER)), "reader");
    EXPECT_EQ(name(Bearer(v1::Token::TRAINER)), "trainer");
  }
  EXPECT_EQ(name("Bearer unknown"), "127.0.0.1");
  NameClientsBy(nullptr);
  EXPECT_EQ(name(Bearer(v1::Token::READER)), "127.0.0.1");
}

}  // namespace callers_test
}  // namespace emberd::security
