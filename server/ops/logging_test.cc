// Log lines are parsed by machines that drop what they cannot read: these tests catch a line that a
// hostile value breaks in two, or that is not JSON, and a level or a file that is not honoured.
#include "server/ops/logging.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"

namespace emberd::ops {
namespace logging_test {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

class LoggingTest : public ::testing::Test {
 protected:
  void SetUp() override { config_.set_file(directory_.Path("log")); }
  void TearDown() override { ASSERT_TRUE(SetUpLogging({}, "emberd").ok()); }

  void Start(v1::LoggingConfig::Format format, const std::string& process = "shard-1") {
    config_.set_format(format);
    const absl::Status status = SetUpLogging(config_, process);
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<std::string> Lines() {
    std::ifstream file(config_.file());
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

  const TempDir directory_ = TempDir::Create().value();
  v1::LoggingConfig config_;
};

TEST_F(LoggingTest, JsonLinesParseBackWithTheirTypes) {
  Start(v1::LoggingConfig::JSON);
  Log(LogLevel::kWarning, "shard does not answer",
      {{"shard", 2},
       {"bytes", int64_t{1} << 60},
       {"seconds", 0.25},
       {"ratio", std::numeric_limits<double>::quiet_NaN()},
       {"retry", true},
       {"address", "127.0.0.1:5002"},
       {"status", absl::UnavailableError("gone")}});
  ASSERT_THAT(Lines(), SizeIs(1));
  const nlohmann::json line = nlohmann::json::parse(Lines()[0]);
  EXPECT_THAT(line["ts"].get<std::string>(),
              MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z"));
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["process"], "shard-1");
  EXPECT_EQ(line["message"], "shard does not answer");
  EXPECT_EQ(line["shard"], 2);
  EXPECT_EQ(line["bytes"], int64_t{1} << 60);
  EXPECT_EQ(line["seconds"], 0.25);
  EXPECT_EQ(line["ratio"], "nan");
  EXPECT_EQ(line["retry"], true);
  EXPECT_EQ(line["address"], "127.0.0.1:5002");
  EXPECT_EQ(line["status"], "UNAVAILABLE: gone");
}

TEST_F(LoggingTest, GoesOnInANewFileWhenTheOldOneWasMoved) {
  Start(v1::LoggingConfig::TEXT);
  Log(LogLevel::kInfo, "before");
  std::filesystem::rename(config_.file(), directory_.Path("moved"));
  Log(LogLevel::kInfo, "moved");
  ReopenLog();
  Log(LogLevel::kInfo, "after");
  ASSERT_THAT(Lines(), SizeIs(2));
  EXPECT_THAT(Lines()[0], HasSubstr(" I shard-1 the log goes on"));
  EXPECT_THAT(Lines()[1], HasSubstr(" I shard-1 after"));

  // Where no file can be made, the one that there is stays.
  std::filesystem::rename(config_.file(), directory_.Path("moved again"));
  std::filesystem::create_directory(config_.file());
  ReopenLog();
  config_.set_file(directory_.Path("moved again"));
  ASSERT_THAT(Lines(), SizeIs(3));
  EXPECT_THAT(Lines()[2], HasSubstr("the log goes on in its old file"));
}

TEST_F(LoggingTest, HostileTextStaysInsideItsJsonString) {
  const std::string process = "50%v \"quoted\"";
  Start(v1::LoggingConfig::JSON, process);
  const std::string hostile = "a\"b\\c\n{\"level\":\"error\"}\t\x01 %v {} \xc3\xa4";
  Log(LogLevel::kInfo, hostile, {{"key \"x\"", hostile}, {"bytes", "\xff\xfe"}});
  ASSERT_THAT(Lines(), SizeIs(1));
  const nlohmann::json line = nlohmann::json::parse(Lines()[0]);
  EXPECT_EQ(line["process"], process);
  EXPECT_EQ(line["message"], hostile);
  EXPECT_EQ(line["key \"x\""], hostile);
  EXPECT_EQ(line["bytes"], "\xef\xbf\xbd\xef\xbf\xbd");
}

TEST_F(LoggingTest, TextIsOneReadableLine) {
  Start(v1::LoggingConfig::TEXT);
  Log(LogLevel::kInfo, "started", {{"grpc", "127.0.0.1:1"}, {"note", "two words"}, {"none", ""}});
  Log(LogLevel::kError, "broken\nline", {{"value", "x\ny"}});
  ASSERT_THAT(Lines(), SizeIs(2));
  EXPECT_THAT(Lines()[0], HasSubstr("Z I shard-1 started grpc=127.0.0.1:1 note=\"two words\" "
                                    "none=\"\""));
  EXPECT_THAT(Lines()[1], HasSubstr("Z E shard-1 \"broken\\nline\" value=\"x\\ny\""));
}

TEST_F(LoggingTest, LevelIsHonoured) {
  config_.set_level(v1::LoggingConfig::WARNING);
  Start(v1::LoggingConfig::TEXT);
  Log(LogLevel::kDebug, "no");
  Log(LogLevel::kInfo, "no");
  Log(LogLevel::kWarning, "yes");
  Log(LogLevel::kError, "yes");
  EXPECT_THAT(Lines(), SizeIs(2));
}

// Bytes from the network must not become log lines: anyone could fill the disk with them.
TEST_F(LoggingTest, DamagedMessagesAreNoNews) {
  Start(v1::LoggingConfig::TEXT);
  v1::LoggingConfig message;
  EXPECT_FALSE(message.ParseFromString("\x1a\x02\xff\xff"));
  EXPECT_THAT(Lines(), SizeIs(0));
  config_.set_level(v1::LoggingConfig::DEBUG);
  Start(v1::LoggingConfig::TEXT);
  EXPECT_FALSE(message.ParseFromString("\x1a\x02\xff\xff"));
  EXPECT_THAT(Lines(), SizeIs(1));
}

TEST_F(LoggingTest, AFileThatCannotBeOpenedIsAnErrorThatNamesIt) {
  v1::LoggingConfig config;
  config.set_file(directory_.path());  // a directory
  const absl::Status status = SetUpLogging(config, "shard-0");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("logging.file: \"" + directory_.path() + "\""));
}

TEST_F(LoggingTest, RepeatedWarningsAreCountedNotWritten) {
  Start(v1::LoggingConfig::JSON);
  RateLimitedLog log(absl::Seconds(5));
  const absl::Time start = absl::UnixEpoch();
  for (int i = 0; i < 10; ++i) log.LogAt(start + absl::Milliseconds(i), LogLevel::kInfo, "m", {});
  log.LogAt(start + absl::Seconds(5), LogLevel::kInfo, "m", {});
  log.LogAt(start + absl::Seconds(10), LogLevel::kInfo, "m", {});
  ASSERT_THAT(Lines(), SizeIs(3));
  EXPECT_FALSE(nlohmann::json::parse(Lines()[0]).contains("suppressed"));
  EXPECT_EQ(nlohmann::json::parse(Lines()[1])["suppressed"], 9);
  EXPECT_FALSE(nlohmann::json::parse(Lines()[2]).contains("suppressed"));
}

TEST_F(LoggingTest, LinesOfManyThreadsDoNotMix) {
  Start(v1::LoggingConfig::JSON);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) Log(LogLevel::kInfo, "line", {{"thread", t}, {"i", i}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(800));
  for (const std::string& line : lines) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
}

// What strangers choose must not use up the places of all that come later.
TEST_F(LoggingTest, KeysAreForgottenWhenTheirPeriodIsOver) {
  Start(v1::LoggingConfig::TEXT);
  constexpr absl::Duration kPeriod = absl::Milliseconds(200);
  KeyedLog log(kPeriod);
  for (size_t i = 0; i < KeyedLog::kMaxKeys; ++i) {
    log.Log(absl::StrCat("key ", i), LogLevel::kInfo, "first");
  }
  absl::SleepFor(2 * kPeriod);
  for (const char* key : {"x", "y", "z"}) log.Log(key, LogLevel::kInfo, "later");
  EXPECT_THAT(Lines(), SizeIs(KeyedLog::kMaxKeys + 3));
}

// A client without the right certificate tries ten times a second.
TEST_F(LoggingTest, WhatGrpcRepeatsIsOneLine) {
  Start(v1::LoggingConfig::TEXT);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // gRPC's default, which its start sets
  for (int i = 0; i < 100; ++i) {
    gpr_log(GPR_ERROR, "handshake of LoggingTest failed");
    gpr_log(GPR_ERROR, "another fault of LoggingTest");
  }
  ASSERT_THAT(Lines(), SizeIs(2));
  EXPECT_THAT(Lines()[0], HasSubstr("handshake of LoggingTest failed source=grpc"));
}

}  // namespace logging_test
}  // namespace emberd::ops
