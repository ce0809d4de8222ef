#include "server/ops/http.h"

#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/ops/http_get.h"

namespace emberd::ops {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(HttpServerTest, ServesMetricsOnAPortThatTheSystemPicked) {
  Metrics metrics("shard");
  auto server = HttpServer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_GT((*server)->port(), 0);
  EXPECT_EQ((*server)->address(), "127.0.0.1:" + std::to_string((*server)->port()));
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.1, 5, 6);
  const std::string answer = HttpGet((*server)->port(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer,
              HasSubstr("emberd_build_info{role=\"shard\",version=\"" EMBERD_VERSION "\"}"));
  EXPECT_THAT(answer, HasSubstr("emberd_rpcs_total{code=\"OK\","));
  EXPECT_THAT(answer, HasSubstr("process_resident_memory_bytes "));
  EXPECT_THAT(HttpGet((*server)->port(), "/other"), StartsWith("HTTP/1.1 404"));
}

TEST(HttpServerTest, StopsListeningWhenDestroyed) {
  Metrics metrics("shard");
  auto server = HttpServer::Start("localhost:0", metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  server->reset();
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
}

TEST(HttpServerTest, AnAddressInUseIsAnErrorThatNamesIt) {
  Metrics metrics("shard");
  auto first = HttpServer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = HttpServer::Start((*first)->address(), metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr((*first)->address()));
}

TEST(HttpServerTest, WhatIsNoAddressIsRefused) {
  Metrics metrics("shard");
  for (const char* address : {"", "8080", ":8080", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
                              "127.0.0.1:80s", "127.0.0.1:0,127.0.0.1:0"}) {
    EXPECT_EQ(HttpServer::Start(address, metrics).status().code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
}

}  // namespace
}  // namespace emberd::ops
