#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "config/config.h"
#include "config/credentials.h"
#include "server/launcher/verbs.h"
#include "server/security/security.h"

namespace emberd::launcher {
namespace make_token_test {

using ::testing::HasSubstr;
using ::testing::Not;

class MakeTokenTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(std::filesystem::create_directory(directory_)); }
  void Write(const std::string& text) const { std::ofstream(file_) << text; }
  std::string Read() const {
    std::ostringstream text;
    text << std::ifstream(file_).rdbuf();
    return text.str();
  }

  // The token.
  static absl::StatusOr<std::string> MakeToken(const NewToken& token) {
    std::string made;
    RETURN_IF_ERROR(launcher::MakeToken(token, [&](const std::string& secret) {
      made = secret;
      return absl::OkStatus();
    }));
    return made;
  }
  std::ptrdiff_t FilesThere() const {
    return std::distance(std::filesystem::directory_iterator(directory_), {});
  }

  const TempDir temporary_ = TempDir::Create().value();  // locked, as is the folder of tokens
  const std::string directory_ = temporary_.path() + "/secrets";
  const std::string file_ = directory_ + "/tokens";
};

TEST_F(MakeTokenTest, ProcessesKnowTheTokensThatItMakes) {
  const auto alice = MakeToken({file_, "alice", v1::Token::TRAINER});
  const auto cluster = MakeToken({file_, "cluster", v1::Token::CLUSTER});
  ASSERT_TRUE(alice.ok() && cluster.ok()) << alice.status() << cluster.status();
  EXPECT_NE(*alice, *cluster);
  EXPECT_TRUE(config::CheckToken("token", *alice).ok());
  EXPECT_THAT(Read(), Not(HasSubstr(*alice)));
  const auto file = config::LoadTokenFile(file_);
  ASSERT_TRUE(file.ok()) << file.status();
  const security::TokenTable table(*file);
  ASSERT_NE(table.Find(*alice), nullptr);
  EXPECT_EQ(table.Find(*alice)->name, "alice");
  EXPECT_EQ(table.Find(*cluster)->role, v1::Token::CLUSTER);
}

TEST_F(MakeTokenTest, KeepsWhatStandsInTheFile) {
  Write("# who trains at night\ntokens { name: 'bob' role: READER sha256: '" +
        std::string(64, '0') + "' }");
  ASSERT_TRUE(MakeToken({file_, "alice", v1::Token::TRAINER}).ok());
  EXPECT_THAT(Read(), HasSubstr("# who trains at night\n"));
  EXPECT_EQ(config::LoadTokenFile(file_)->tokens_size(), 2);
}

TEST_F(MakeTokenTest, ABadRequestLeavesTheFileAsItWas) {
  ASSERT_TRUE(MakeToken({file_, "alice", v1::Token::TRAINER}).ok());
  const std::string before = Read();
  for (const NewToken& bad :
       {NewToken{file_, "alice", v1::Token::READER}, NewToken{file_, "", v1::Token::READER},
        NewToken{file_, "a\" b", v1::Token::READER}, NewToken{file_, "bob"}}) {
    const absl::Status status = MakeToken(bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.name << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(file_));
  }
  EXPECT_EQ(Read(), before);
}

TEST_F(MakeTokenTest, DoesNotTouchWhatIsNoTextProto) {
  for (const std::string& text : {std::string("nonsense"),
                                  R"({"tokens": [{"name": "a", "role": "ADMIN", "sha256": ")" +
                                      std::string(64, '1') + "\"}]}",
                                  std::string("# of the night\n {}")}) {
    Write(text);
    EXPECT_FALSE(MakeToken({file_, "alice", v1::Token::TRAINER}).ok()) << text;
    EXPECT_EQ(Read(), text);
  }
}

// Would catch a call that reads the file before another one has written it.
TEST_F(MakeTokenTest, CallsAtTheSameTimeLoseNoToken) {
  constexpr int kCalls = 8;
  std::vector<std::thread> threads;
  for (int i = 0; i < kCalls; ++i) {
    threads.emplace_back([this, i] {
      const absl::Status status =
          MakeToken({file_, absl::StrCat("t", i), v1::Token::READER}).status();
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(config::LoadTokenFile(file_)->tokens_size(), kCalls);
  EXPECT_EQ(FilesThere(), 1);
}

// It waited for ever.
TEST_F(MakeTokenTest, SaysThatItsFolderIsLocked) {
  NewToken token{temporary_.path() + "/tokens", "alice", v1::Token::TRAINER};
  token.patience = absl::ZeroDuration();
  const absl::Status status = MakeToken(token).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(temporary_.path() + ": cannot be locked"));
  EXPECT_FALSE(std::filesystem::exists(token.file));
}

TEST_F(MakeTokenTest, KeepsLinksAndTheModeOfTheFile) {
  const std::string link = file_ + ".link";
  std::filesystem::create_symlink("tokens", link);
  ASSERT_TRUE(MakeToken({file_, "alice", v1::Token::TRAINER}).ok());
  const auto secret = std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;
  std::filesystem::permissions(file_, secret);
  ASSERT_TRUE(MakeToken({link, "bob", v1::Token::TRAINER}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(std::filesystem::status(file_).permissions(), secret);
  EXPECT_EQ(config::LoadTokenFile(file_)->tokens_size(), 2);
}

TEST_F(MakeTokenTest, AHolderMayBeCalledTokens) {
  ASSERT_TRUE(MakeToken({file_, "tokens", v1::Token::TRAINER}).ok());
  const auto second = MakeToken({file_, "alice", v1::Token::TRAINER});
  EXPECT_TRUE(second.ok()) << second.status();
}

TEST_F(MakeTokenTest, ATokenThatNobodyHasIsNotAdded) {
  const absl::Status status =
      launcher::MakeToken({file_, "alice", v1::Token::TRAINER},
                          [](const std::string&) { return absl::DataLossError("no room"); });
  EXPECT_EQ(status, absl::DataLossError("no room"));
  EXPECT_EQ(FilesThere(), 0);
}

}  // namespace make_token_test
}  // namespace emberd::launcher
