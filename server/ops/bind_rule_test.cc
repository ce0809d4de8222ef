#include "server/ops/bind_rule.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::ops {
namespace {

TEST(BindRuleTest, OnlyLoopbackUnlessAskedFor) {
  for (const char* address : {"127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(CheckBindAllowed("f", address, false).ok()) << address;
  }
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example:1"}) {
    const absl::Status status = CheckBindAllowed("shards[1].address", address, false);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("shards[1].address: "));
    EXPECT_TRUE(CheckBindAllowed("f", address, true).ok()) << address;
  }
  for (const char* address : {"", "127.0.0.1", "[::1]", ":80", "127.0.0.1:65536"}) {
    EXPECT_FALSE(CheckBindAllowed("f", address, true).ok()) << address;
  }
}

}  // namespace
}  // namespace emberd::ops
