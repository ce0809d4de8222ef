#include "config/credentials.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing/test_ca.h"

namespace emberd::config {
namespace credentials_test {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CredentialsTest : public testing::Test {
 protected:
  PemPaths Paths() const {
    return {.certificate_field = "cert",
            .certificate_file = ca_.Path("server.pem"),
            .key_field = "key",
            .key_file = ca_.Path("server-key.pem"),
            .ca_field = "ca",
            .ca_file = ca_.Path("ca.pem")};
  }
  static std::string Error(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  }

  const TestCa ca_;
};

TEST_F(CredentialsTest, ReadsACertificateWithItsKeyAndAuthorities) {
  const auto files = LoadPemFiles(Paths());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_THAT(files->certificate, HasSubstr("BEGIN CERTIFICATE"));
  EXPECT_THAT(files->key, HasSubstr("BEGIN EC PRIVATE KEY"));
  EXPECT_THAT(files->ca, HasSubstr("BEGIN CERTIFICATE"));
  EXPECT_GE(files->days_left, 28);
}

TEST_F(CredentialsTest, ReadsAChainAmongOtherThings) {
  const auto server = LoadPemFiles(Paths());
  PemPaths paths = Paths();
  paths.certificate_file =
      ca_.Write("chain.pem", server->certificate + "text\n" + server->key + server->ca + "\n\n");
  EXPECT_TRUE(LoadPemFiles(paths).ok()) << LoadPemFiles(paths).status();
}

TEST_F(CredentialsTest, EachPartMayBeMissing) {
  PemPaths paths = Paths();
  paths.ca_file.clear();
  EXPECT_EQ(LoadPemFiles(paths)->ca, "");
  paths = Paths();
  paths.certificate_file.clear();
  paths.key_file.clear();
  EXPECT_EQ(LoadPemFiles(paths)->certificate, "");
  EXPECT_TRUE(LoadPemFiles({}).ok());
}

TEST_F(CredentialsTest, AnExpiredCertificateIsReadAndKnown) {
  PemPaths paths = Paths();
  paths.certificate_file = ca_.Path("expired.pem");
  paths.key_file = ca_.Path("expired-key.pem");
  const auto files = LoadPemFiles(paths);
  ASSERT_TRUE(files.ok()) << files.status();
  // One day ago, or in 2020: what deploy/make_test_ca.sh can say depends on the version of openssl.
  EXPECT_TRUE(files->days_left == -1 || files->days_left < -365) << files->days_left;
}

TEST_F(CredentialsTest, ErrorsNameTheFieldAndTheFile) {
  const std::string nothing = ca_.Path("nothing");
  const std::string text = ca_.Write("text", "no PEM");
  const std::string key = ca_.Path("server-key.pem");
  const std::string other = ca_.Path("client-key.pem");
  const std::string good = LoadPemFiles(Paths())->certificate;
  const std::string cut = ca_.Write("cut.pem", good + good.substr(0, good.size() / 2));
  const struct {
    std::string PemPaths::*file;
    std::string path;
    std::string error;
  } cases[] = {
      {&PemPaths::certificate_file, cut,
       "cert: " + cut + ": a certificate behind the first is dam"},
      {&PemPaths::ca_file, cut,
       "ca: " + cut +
           ": a certificate behind the first is damaged; the file was probably cut when it was "
           "copied: copy the whole of it again"},
      {&PemPaths::certificate_file, nothing, "cert: " + nothing + ": No such file"},
      {&PemPaths::certificate_file, ca_.Path("."), "cert: " + ca_.Path(".") + ": "},
      {&PemPaths::certificate_file, text, "cert: " + text + ": holds no certificate"},
      {&PemPaths::certificate_file, key, "cert: " + key + ": holds no certificate"},
      {&PemPaths::certificate_file, "", "cert: empty; key needs its certificate"},
      {&PemPaths::key_file, nothing, "key: " + nothing + ": No such file"},
      {&PemPaths::key_file, text, "key: " + text + ": holds no private key"},
      {&PemPaths::key_file, other, "key: " + other + ": is not the key of the certificate in cert"},
      {&PemPaths::key_file, "", "key: empty; cert needs its key"},
      {&PemPaths::ca_file, nothing, "ca: " + nothing + ": No such file"},
      {&PemPaths::ca_file, ca_.Write("empty", ""), "ca: " + ca_.Path("empty") + ": holds no"},
      {&PemPaths::ca_file, key, "ca: " + key + ": holds no certificate"},
  };
  for (const auto& bad : cases) {
    PemPaths paths = Paths();
    paths.*bad.file = bad.path;
    EXPECT_THAT(Error(LoadPemFiles(paths).status()), StartsWith(bad.error));
  }
}

TEST_F(CredentialsTest, AFileThatTheMachineCannotReadIsNoWrongArgument) {
  PemPaths paths = Paths();
  paths.key_file = "/proc/self/mem";  // nothing is at address 0
  const absl::Status status = LoadPemFiles(paths).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), StartsWith("key: /proc/self/mem: Input/output error"));
}

// Nobody can type it in, and a prompt would hang the start.
TEST_F(CredentialsTest, AKeyWithAPasswordIsRefused) {
  const std::string locked = ca_.Path("locked.pem");
  const std::string command = "openssl ec -in '" + ca_.Path("server-key.pem") +
                              "' -aes256 -passout pass:secret -out '" + locked + "' 2>/dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0);
  PemPaths paths = Paths();
  paths.key_file = locked;
  EXPECT_THAT(Error(LoadPemFiles(paths).status()), HasSubstr("without a password"));
}

TEST_F(CredentialsTest, ATokenIsOneLine) {
  EXPECT_EQ(*LoadToken("f", ca_.Write("token", "  0123456789abcdef\n")), "0123456789abcdef");
  for (const char* text :
       {"", "short", "0123456789 abcdef", "0123456789abcdef\nsecond", "0123456789abcdef\x01"}) {
    const std::string error = Error(LoadToken("f", ca_.Write("token", text)).status());
    const std::string place = "f: " + ca_.Path("token") + ": ";
    ASSERT_THAT(error, StartsWith(place + "a token of ")) << text;
    EXPECT_THAT(error.substr(place.size()), Not(HasSubstr("89"))) << "it shows the token";
  }
  EXPECT_THAT(Error(LoadToken("f", ca_.Path("nothing")).status()),
              StartsWith("f: " + ca_.Path("nothing") + ": No such file"));
  EXPECT_FALSE(CheckToken("f", std::string(4097, 'a')).ok());
  EXPECT_TRUE(CheckToken("f", std::string(4096, 'a')).ok());
}

}  // namespace credentials_test
}  // namespace emberd::config
