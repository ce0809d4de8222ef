#include "config/address.h"

#include <gtest/gtest.h>

namespace emberd::config {
namespace address_test {

struct GoodAddress {
  const char* text;
  const char* host;
  int port;
};

TEST(ParseAddress, SplitsHostAndPort) {
  const GoodAddress cases[] = {
      {"localhost:7000", "localhost", 7000},
      {"127.0.0.1:0", "127.0.0.1", 0},
      {"shard-3.emberd.svc:65535", "shard-3.emberd.svc", 65535},
      {"Shard_1:080", "shard_1", 80},
      {"[::1]:70", "[::1]", 70},
      {"[FE80::1]:70", "[fe80::1]", 70},
  };
  for (const GoodAddress& good : cases) {
    const auto address = ParseAddress(good.text);
    ASSERT_TRUE(address.ok()) << good.text << ": " << address.status();
    EXPECT_EQ(address->host, good.host);
    EXPECT_EQ(address->port, good.port);
  }
}

TEST(ParseAddress, RefusesEverythingElse) {
  for (const char* bad : {"",       ":",      "h",     "h:",       ":1",       "h:65536", "h:-1",
                          "h:+1",   "h:0x10", "h: 1",  "h:1 ",     "h:000001", "a b:1",   "[]:1",
                          "[::1:1", "::1]:1", "::1:1", "[g::1]:1", "h:1:2",    "h/:1"}) {
    EXPECT_FALSE(ParseAddress(bad).ok()) << bad;
  }
}

TEST(ParseAddress, ToStringGivesTheTextBack) {
  EXPECT_EQ(ParseAddress("[::1]:70")->ToString(), "[::1]:70");
  EXPECT_EQ(ParseAddress("Host:0070")->ToString(), "host:70");
}

TEST(ParseAddress, KnowsTheWildcardHosts) {
  EXPECT_TRUE(ParseAddress("0.0.0.0:1")->is_wildcard());
  EXPECT_TRUE(ParseAddress("[::]:1")->is_wildcard());
  EXPECT_FALSE(ParseAddress("10.0.0.0:1")->is_wildcard());
}

TEST(ParseAddress, KnowsWhatOtherMachinesCannotReach) {
  for (const char* text : {"127.0.0.1:1", "127.8.8.8:1", "localhost:1", "LocalHost:1", "[::1]:1"}) {
    EXPECT_TRUE(ParseAddress(text)->is_loopback()) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example:1"}) {
    EXPECT_FALSE(ParseAddress(text)->is_loopback()) << text;
  }
}

}  // namespace address_test
}  // namespace emberd::config
