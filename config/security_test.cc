#include "config/security.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "config/config.h"

namespace emberd::config {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kLoopback[] =
    "shards { address: '127.0.0.1:0' } coordinators { address: 'localhost:0' } ";
constexpr char kNetwork[] =
    "shards { address: '127.0.0.1:0' } "
    "coordinators { address: 'localhost:0' http_address: '0.0.0.0:90' } ";
constexpr char kTls[] = "tls { certificate_file: 'c' key_file: 'k' ca_file: 'a' } ";
constexpr char kTokens[] = "tokens_file: 't' cluster_token_file: 'u' ";

absl::Status Check(const std::string& cluster, const std::string& security) {
  return ParseCluster(absl::StrCat(cluster, "security { ", security, " }")).status();
}

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(CheckSecurity, TakesEachKindByItselfAndTogether) {
  for (const char* cluster : {kLoopback, kNetwork}) {
    EXPECT_TRUE(Check(cluster, "").ok());
    EXPECT_TRUE(Check(cluster, kTls).ok());
    EXPECT_TRUE(Check(cluster, absl::StrCat(kTls, kTokens)).ok());
  }
  EXPECT_TRUE(Check(kLoopback, kTokens).ok());
}

TEST(CheckSecurity, NamesTheFileThatIsMissing) {
  EXPECT_THAT(Error(Check(kLoopback, "tls { key_file: 'k' ca_file: 'a' }")),
              StartsWith("security.tls.certificate_file: empty; TLS needs"));
  EXPECT_THAT(Error(Check(kLoopback, "tls { certificate_file: 'c' ca_file: 'a' }")),
              StartsWith("security.tls.key_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tls { certificate_file: 'c' key_file: 'k' }")),
              StartsWith("security.tls.ca_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tls { require_client_certificate: true }")),
              StartsWith("security.tls.certificate_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "tokens_file: 't'")),
              StartsWith("security.cluster_token_file: empty; "));
  EXPECT_THAT(Error(Check(kLoopback, "cluster_token_file: 't'")),
              StartsWith("security.tokens_file: empty; "));
}

// Such a port could be bound, but gRPC would hang up on everybody.
TEST(CheckSecurity, PlainTokensTakeOneLoopbackAddressOnly) {
  for (const char* host : {"127.0.0.1", "[::1]", "localhost", "LOCALHOST"}) {
    EXPECT_TRUE(Check(absl::StrCat("shards { address: '", host, ":1' } "), kTokens).ok()) << host;
  }
  EXPECT_THAT(Error(Check("shards { address: '127.8.8.8:1' } ", kTokens)),
              StartsWith("shards[0].address: \"127.8.8.8:1\" is not 127.0.0.1"));
}

TEST(CheckSecurity, TokensDoNotTravelInPlainTextThroughANetwork) {
  EXPECT_THAT(Error(Check(kNetwork, kTokens)),
              StartsWith("coordinators[0].http_address: \"0.0.0.0:90\" is not 127.0.0.1, [::1]"));
  EXPECT_THAT(Error(Check("shards { address: 'h:1' } ", kTokens)),
              StartsWith("shards[0].address: \"h:1\" is not 127.0.0.1"));
}

std::string Digest(char digit) { return std::string(64, digit); }

std::string Token(const std::string& name, const std::string& role, const std::string& digest) {
  return absl::StrCat("tokens { name: '", name, "' role: ", role, " sha256: '", digest, "' } ");
}

TEST(ParseTokenFile, TakesTextAndJson) {
  const auto text =
      ParseTokenFile(Token("a", "READER", Digest('A')) + Token("b", "CLUSTER", Digest('0')));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->tokens_size(), 2);
  EXPECT_EQ(text->tokens(0).sha256(), Digest('a'));
  const auto json = ParseTokenFile(absl::StrCat(
      R"({"tokens": [{"name": "a", "role": "ADMIN", "sha256": ")", Digest('1'), "\"}]}"));
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->tokens(0).role(), v1::Token::ADMIN);
}

TEST(ParseTokenFile, NamesTheFieldThatIsWrong) {
  const std::string good = Token("a", "READER", Digest('a'));
  const struct {
    std::string text;
    const char* error;
  } cases[] = {
      {"", "tokens: empty; at least one is needed"},
      {Token("", "READER", Digest('a')), "tokens[0].name: "},
      {Token("a b", "READER", Digest('a')), "tokens[0].name: \"a b\" is not allowed"},
      {Token(std::string(129, 'n'), "READER", Digest('a')), "tokens[0].name: "},
      {"tokens { name: 'a' sha256: '" + Digest('a') + "' }",
       "tokens[0].role: ROLE_UNSPECIFIED is not allowed; it must be one of READER, TRAINER"},
      {Token("a", "9", Digest('a')), "tokens[0].role: 9 is not allowed"},
      {good + Token("b", "ADMIN", Digest('a') + "a"),
       "tokens[1].sha256: a text of 65 characters is not allowed; it must be 64 hex digits"},
      {good + Token("b", "ADMIN", Digest('g')), "tokens[1].sha256: a text of 64 characters is not"},
      {good + Token("a", "ADMIN", Digest('b')),
       "tokens[1].name: \"a\" is not allowed; it must be unique; it is also tokens[0].name"},
      {good + Token("b", "ADMIN", Digest('A')), "tokens[1].sha256: the token is also tokens[0]'s"},
  };
  for (const auto& bad : cases) {
    EXPECT_THAT(Error(ParseTokenFile(bad.text).status()), StartsWith(bad.error)) << bad.text;
  }
}

// Whoever mistakes the field for the token itself must not find the token in a log.
TEST(ParseTokenFile, DoesNotRepeatWhatMayBeAToken) {
  EXPECT_THAT(Error(ParseTokenFile(Token("a", "READER", "s3cret")).status()),
              Not(HasSubstr("s3cret")));
  // The token's own file, taken for the list of digests.
  EXPECT_THAT(Error(ParseTokenFile("s3cret\n").status()), Not(HasSubstr("s3cret")));
}

TEST(LoadTokenFile, NamesTheFile) {
  const absl::Status status = LoadTokenFile("/nowhere/tokens").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), StartsWith("/nowhere/tokens: "));
}

}  // namespace
}  // namespace emberd::config
