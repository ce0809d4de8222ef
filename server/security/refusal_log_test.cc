#include "server/security/refusal_log.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "server/security/testing/log_file.h"

namespace emberd::security {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(RefusalLogTest, TheSameRefusalIsOneLine) {
  const LogFile file;
  RefusalLog log;
  for (int i = 0; i < 100; ++i) {
    log.Add({.method = "A/B", .reason = "no token", .client = "", .agent = "curl"});
    log.Add({.method = "A/C", .reason = "no token", .client = "alice", .agent = ""});
  }
  EXPECT_THAT(file.Lines(),
              ElementsAre(AllOf(HasSubstr(" W test refused method=A/B reason=\"no token\""),
                                HasSubstr("agent=curl")),
                          AllOf(HasSubstr("method=A/C"), HasSubstr("client=alice"))));
}

// Whoever calls with ever new names fills neither memory nor disk.
TEST(RefusalLogTest, EndlesslyManyKindsAreBounded) {
  const LogFile file;
  RefusalLog log;
  for (int i = 0; i < 3000; ++i) {
    const std::string agent = absl::StrCat("agent-", i);
    log.Add({.method = "A/B", .reason = "no token", .client = "", .agent = agent});
  }
  EXPECT_THAT(file.Lines(), SizeIs(ops::KeyedLog::kMaxKeys + 1));
}

TEST(RefusalLogTest, WhatTheCallerChoseIsCutAndEscaped) {
  const LogFile file;
  RefusalLog log;
  const std::string agent = "a\nb" + std::string(100'000, 'x');
  log.Add({.method = agent, .reason = "no token", .client = "", .agent = agent});
  ASSERT_THAT(file.Lines(), SizeIs(1));
  EXPECT_LT(file.Lines()[0].size(), 500u);
}

}  // namespace
}  // namespace emberd::security
