#include "server/security/token_table.h"

#include <string>

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "server/security/testing/tokens.h"

namespace emberd::security {
namespace {

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
  EXPECT_EQ(table.Find(absl::HexStringToBytes(file.tokens(0).sha256())), nullptr);
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

}  // namespace
}  // namespace emberd::security
