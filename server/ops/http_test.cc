#include "server/ops/http.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "base/testing/await.h"
#include "base/testing/http_get.h"
#include "config/credentials.h"
#include "config/testing/test_ca.h"

namespace emberd::ops {
namespace http_test {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

HttpRoute Page(const std::string& path, const std::string& body) {
  return {path, "text/plain", [body]() -> HttpAnswer { return {200, body}; }};
}

std::unique_ptr<HttpServer> Start(std::vector<HttpRoute> routes) {
  auto server = HttpServer::Start({.address = "127.0.0.1:0", .routes = std::move(routes)});
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

TEST(HttpServerTest, ServesMetricsOnAPortThatTheSystemPicked) {
  Metrics metrics("shard");
  const auto server = Start({MetricsRoute(metrics)});
  ASSERT_NE(server, nullptr);
  EXPECT_GT(server->port(), 0);
  EXPECT_EQ(server->address(), "127.0.0.1:" + std::to_string(server->port()));
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.1);
  metrics.AddRpcBytes(Rpc::kLookup, 5, 6);
  const std::string answer = HttpGet(server->port(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer,
              HasSubstr("emberd_build_info{role=\"shard\",version=\"" EMBERD_VERSION "\"}"));
  EXPECT_THAT(answer, HasSubstr("emberd_rpcs_total{code=\"OK\","));
  EXPECT_THAT(answer, HasSubstr("process_resident_memory_bytes "));
}

TEST(HttpServerTest, HealthFollowsTheProcess) {
  std::atomic<bool> serving = true;
  const auto server = Start({HealthRoute([&serving] { return serving.load(); })});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(HttpGet(server->port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  serving = false;
  EXPECT_THAT(HttpGet(server->port(), "/healthz"), StartsWith("HTTP/1.1 503"));
}

TEST(HttpServerTest, TheIndexNamesTheProcessAndLinks) {
  const auto server = Start({IndexRoute("shard-3", {"/metrics"})});
  ASSERT_NE(server, nullptr);
  const std::string answer = HttpGet(server->port(), "/");
  EXPECT_THAT(answer, HasSubstr("shard-3"));
  EXPECT_THAT(answer, HasSubstr("href=\"/metrics\""));
}

TEST(HttpServerTest, FindsARouteByItsWholePath) {
  const auto server = Start({Page("/", "the index"), Page("/a", "page a"), Page("/b", "page b")});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(HttpGet(server->port(), "/"), EndsWith("\r\n\r\nthe index"));
  EXPECT_THAT(HttpGet(server->port(), "/a"), EndsWith("\r\n\r\npage a"));
  EXPECT_THAT(HttpGet(server->port(), "/b?a=1&b"), EndsWith("\r\n\r\npage b"));
  for (const char* path : {"/c", "/a/", "/A", "//", "/a/b", "/../a", "/%00", "/a%00", "a", "*"}) {
    EXPECT_THAT(HttpGet(server->port(), path),
                AnyOf(StartsWith("HTTP/1.1 404"), StartsWith("HTTP/1.1 400")))
        << path;
  }
}

TEST(HttpServerTest, AnswersAreNeitherCachedNorGuessedNorLoadOthers) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  for (const char* path : {"/a", "/other"}) {
    const std::string answer = HttpGet(server->port(), path);
    EXPECT_THAT(answer, HasSubstr("Content-Security-Policy: default-src 'none';"));
    EXPECT_THAT(answer, Not(HasSubstr("http://")));
    EXPECT_THAT(answer, HasSubstr("X-Content-Type-Options: nosniff"));
    EXPECT_THAT(answer, HasSubstr("Cache-Control: no-store"));
  }
}

TEST(HttpServerTest, HeadHasTheHeadersAlone) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  const std::string answer = HttpCall(server->port(), "HEAD", "/a");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 6"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST(HttpServerTest, OtherMethodsAreNotAllowed) {
  std::atomic<int> calls = 0;
  const auto server = Start({{"/a", "text/plain", [&calls]() -> HttpAnswer {
                                ++calls;
                                return {};
                              }}});
  ASSERT_NE(server, nullptr);
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "get", "X"}) {
    const std::string answer = HttpCall(server->port(), method, "/a");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD")) << method;
  }
  EXPECT_EQ(calls, 0);
}

// A body that is taken for the next request would let a client hide requests in others.
TEST(HttpServerTest, ABodyIsNeitherReadNorTakenForARequest) {
  const auto server = Start({Page("/a", "page a"), Page("/b", "page b")});
  ASSERT_NE(server, nullptr);
  for (const char* method : {"GET", "POST"}) {
    HttpConnection connection(server->port(), /*silence=*/5);  // the server keeps it open
    const std::string hidden = "GET /b HTTP/1.1\r\nHost: x\r\n\r\n";
    connection.Send(std::string(method) + " /a HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                    std::to_string(hidden.size()) + "\r\n\r\n" + hidden);
    EXPECT_THAT(connection.ReadAll(), Not(HasSubstr("page b"))) << method;
    const std::string endless =
        HttpCall(server->port(), method, "/a", "Content-Length: 99999999999\r\n");
    EXPECT_THAT(endless, StartsWith("HTTP/1.1 ")) << method;
  }
}

TEST(HttpServerTest, OversizeHeadersAreRefused) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  const std::string large(2 * HttpServer::kMaxHeaderBytes, 'x');
  std::string many;
  while (many.size() < large.size()) many += "X-A: b\r\n";
  EXPECT_THAT(HttpCall(server->port(), "GET", "/a", "X-Large: " + large + "\r\n"),
              Not(HasSubstr("page a")));
  EXPECT_THAT(HttpCall(server->port(), "GET", "/a", many), Not(HasSubstr("page a")));
  EXPECT_THAT(HttpCall(server->port(), "GET", "/a?" + large), Not(HasSubstr("page a")));
  EXPECT_THAT(HttpGet(server->port(), "/a"), EndsWith("page a"));
}

TEST(HttpServerTest, WhatIsNoHttpIsRefused) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  for (const char* text : {"\r\n\r\n", "GET\r\n\r\n", "GET /a HTTP/9.9\r\n\r\n", "\x16\x03\x01",
                           "GET /a HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}) {
    HttpConnection connection(server->port());
    connection.Send(text);
  }
  EXPECT_THAT(HttpGet(server->port(), "/a"), EndsWith("page a"));
}

// The library has crashed where it was stopped while it refused something.
TEST(HttpServerTest, StopsWhileItRefuses) {
  for (int i = 0; i < 50; ++i) {
    auto server = Start({Page("/a", "page a")});
    ASSERT_NE(server, nullptr);
    std::atomic<bool> stop = false;
    std::thread stranger([&stop, port = server->port()] {
      while (!stop) HttpConnection(port).Send("GET /a HTTP/9.9\r\n\r\n");
    });
    EXPECT_THAT(HttpGet(server->port(), "/a"), EndsWith("page a"));
    server.reset();
    stop = true;
    stranger.join();
  }
}

TEST(HttpServerTest, SlowClientsAndPagesKeepNobodyElseWaiting) {
  absl::Notification enter, leave;
  const auto server = Start({Page("/fast", "fast"), {"/slow", "text/plain", [&]() -> HttpAnswer {
                                                       enter.Notify();
                                                       leave.WaitForNotification();
                                                       return {200, "slow"};
                                                     }}});
  ASSERT_NE(server, nullptr);
  std::vector<std::unique_ptr<HttpConnection>> silent;
  for (int i = 0; i < HttpServer::kMaxConnections / 2; ++i) {
    silent.push_back(std::make_unique<HttpConnection>(server->port()));
    silent.back()->Send("GET /fast HTTP/1.1\r\n");
  }
  std::string slow;
  std::thread waiter([&] { slow = HttpGet(server->port(), "/slow"); });
  enter.WaitForNotification();
  EXPECT_THAT(HttpGet(server->port(), "/fast"), EndsWith("fast"));
  leave.Notify();
  waiter.join();
  EXPECT_THAT(slow, EndsWith("slow"));
}

// They would block every page until they run into their timeout, and so again and again.
TEST(HttpServerTest, HalfRequestsKeepNobodyOut) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  std::vector<std::unique_ptr<HttpConnection>> halves;
  for (int i = 0; i < 3 * HttpServer::kMaxConnections; ++i) {
    halves.push_back(std::make_unique<HttpConnection>(server->port()));
    halves.back()->Send("GET /a HTTP/1.1\r\nHo");
  }
  // Connections that make room end in their own time, which is much less than their timeout.
  EXPECT_TRUE(Eventually([&] { return absl::EndsWith(HttpGet(server->port(), "/a"), "page a"); }));
  EXPECT_EQ(halves.front()->ReadAll(), "");  // it has been closed
}

TEST(HttpServerTest, GoesOnAfterTooManyConnections) {
  const auto server = Start({Page("/a", "page a")});
  ASSERT_NE(server, nullptr);
  {
    std::vector<std::unique_ptr<HttpConnection>> many;
    for (int i = 0; i < 2 * HttpServer::kMaxConnections; ++i) {
      many.push_back(std::make_unique<HttpConnection>(server->port()));
    }
  }
  // Connections that were closed are noticed in their own time.
  EXPECT_TRUE(Eventually([&] { return absl::EndsWith(HttpGet(server->port(), "/a"), "page a"); }));
}

TEST(HttpServerTest, APageThatThrowsIsAnErrorOfThatPageAlone) {
  const auto server =
      Start({Page("/a", "page a"),
             {"/bad", "text/plain", []() -> HttpAnswer { throw std::runtime_error("a secret"); }}});
  ASSERT_NE(server, nullptr);
  const std::string answer = HttpGet(server->port(), "/bad");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 500"));
  EXPECT_THAT(answer, Not(HasSubstr("a secret")));
  EXPECT_THAT(HttpGet(server->port(), "/a"), EndsWith("page a"));
}

TEST(HttpServerTest, AsksBeforeEveryRouteThatIsNotOpen) {
  HttpRoute open = Page("/open", "for all");
  open.open = true;
  const auto admit = [](const HttpRequest& request) {
    EXPECT_EQ(request.peer, "127.0.0.1");
    EXPECT_EQ(request.path, "/closed");
    if (request.authorization == "Bearer good") return absl::OkStatus();
    if (request.authorization.empty()) return absl::UnauthenticatedError("no token");
    return absl::PermissionDeniedError("not you");
  };
  const auto server = HttpServer::Start(
      {.address = "127.0.0.1:0", .routes = {open, Page("/closed", "secret")}, .admit = admit});
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  EXPECT_THAT(HttpGet(port, "/open"), EndsWith("for all"));
  const std::string unknown = HttpGet(port, "/closed");
  EXPECT_THAT(unknown, StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(unknown, HasSubstr("WWW-Authenticate: Bearer"));
  EXPECT_THAT(unknown, EndsWith("401 no token\n"));
  EXPECT_THAT(unknown, HasSubstr("WWW-Authenticate: Basic"));
  EXPECT_THAT(HttpCall(port, "GET", "/closed", "Sec-Fetch-Mode: navigate\r\n"),
              HasSubstr("WWW-Authenticate: Basic"));
  // A script on a page: no dialog.
  EXPECT_THAT(HttpCall(port, "GET", "/closed", "Sec-Fetch-Mode: cors\r\n"),
              AllOf(HasSubstr("WWW-Authenticate: Bearer"), Not(HasSubstr("Basic"))));
  EXPECT_THAT(HttpCall(port, "GET", "/closed", "Authorization: Bearer bad\r\n"),
              StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(HttpCall(port, "GET", "/closed", "Authorization: Bearer good\r\n"),
              EndsWith("secret"));
}

// What curl says to https://localhost:port/a, trusting `ca`: the status code, or "000" if there was
// no answer.
std::string Curl(const config::TestCa& ca, int port, const std::string& options) {
  const std::string out = ca.Path("out");
  const std::string command = "curl --silent --max-time 120 --noproxy '*' -o /dev/null " +
                              std::string("-w '%{http_code}' --cacert ") + ca.Path("ca.pem") + " " +
                              options + " https://localhost:" + std::to_string(port) + "/a >" + out;
  (void)std::system(command.c_str());
  std::ifstream file(out);
  std::string code;
  file >> code;
  return code;
}

HttpTls TlsOf(const config::TestCa& ca, const std::string& client_ca) {
  const auto files = config::LoadPemFiles({.certificate_file = ca.Path("server.pem"),
                                           .key_file = ca.Path("server-key.pem"),
                                           .ca_file = client_ca});
  EXPECT_TRUE(files.ok()) << files.status();
  return {.certificate = files->certificate, .key = files->key, .client_ca = files->ca};
}

TEST(HttpServerTest, SpeaksTlsAlone) {
  const config::TestCa ca;
  const auto server = HttpServer::Start(
      {.address = "127.0.0.1:0", .routes = {Page("/a", "page a")}, .tls = TlsOf(ca, "")});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(Curl(ca, (*server)->port(), ""), "200");
  EXPECT_EQ(Curl(ca, (*server)->port(), "--tls-max 1.2"), "200");
  EXPECT_EQ(Curl(ca, (*server)->port(), "--tls-max 1.1 --ciphers DEFAULT@SECLEVEL=0"), "000");
  EXPECT_THAT(HttpGet((*server)->port(), "/a"), Not(HasSubstr("page a")));
  const config::TestCa other;
  EXPECT_EQ(Curl(other, (*server)->port(), ""), "000");
}

// What this would catch: a port that nobody listens on after the first damaged certificate.
TEST(HttpServerTest, KeepsItsCertificateWhereTheNewOneIsDamaged) {
  const config::TestCa ca;
  const HttpTls tls = TlsOf(ca, "");
  const auto server =
      HttpServer::Start({.address = "127.0.0.1:0", .routes = {Page("/a", "page a")}, .tls = tls});
  ASSERT_TRUE(server.ok()) << server.status();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ((*server)->Renew({"damaged", tls.key, ""}).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Curl(ca, (*server)->port(), ""), "200");
  }
  EXPECT_TRUE((*server)->Renew(TlsOf(ca, "")).ok());
}

// Nobody renews it again for a day.
TEST(HttpServerTest, KeepsItsCertificateWhereItHasNoDescriptorForTheNewOne) {
  const config::TestCa ca, next;
  const auto server = HttpServer::Start(
      {.address = "127.0.0.1:0", .routes = {Page("/a", "page a")}, .tls = TlsOf(ca, "")});
  ASSERT_TRUE(server.ok()) << server.status();
  const HttpTls renewed = TlsOf(next, "");
  rlimit files;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none = {0, files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status refused = (*server)->Renew(renewed);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(Curl(ca, (*server)->port(), ""), "200");
  EXPECT_TRUE((*server)->Renew(renewed).ok());
  EXPECT_EQ(Curl(next, (*server)->port(), ""), "200");
  EXPECT_EQ(Curl(ca, (*server)->port(), ""), "000");
}

TEST(HttpServerTest, AsksForACertificateOfItsAuthority) {
  const config::TestCa ca;
  const config::TestCa other;
  const auto server = HttpServer::Start({.address = "127.0.0.1:0",
                                         .routes = {Page("/a", "page a")},
                                         .tls = TlsOf(ca, ca.Path("ca.pem"))});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto with = [&](const config::TestCa& from, const std::string& name) {
    return Curl(ca, (*server)->port(),
                "--cert " + from.Path(name + ".pem") + " --key " + from.Path(name + "-key.pem"));
  };
  EXPECT_EQ(with(ca, "client"), "200");
  EXPECT_EQ(Curl(ca, (*server)->port(), ""), "403");
  EXPECT_EQ(with(ca, "expired"), "403");
  EXPECT_EQ(with(other, "client"), "403");
}

TEST(HttpServerTest, StopsListeningWhenDestroyedAndHangsUpOnIdleClients) {
  auto server = HttpServer::Start({.address = "localhost:0", .routes = {Page("/a", "page a")}});
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  EXPECT_THAT(HttpGet(port, "/a"), HasSubstr("page a"));  // at 127.0.0.1, which is meant, too
  HttpConnection idle(port);
  idle.Send("GET /a HTTP/1.1\r\n");
  server->reset();
  EXPECT_EQ(idle.ReadAll(), "");
  EXPECT_EQ(HttpGet(port, "/a"), "");
}

TEST(HttpServerTest, AnAddressInUseIsAnErrorThatNamesIt) {
  const auto first = Start({});
  ASSERT_NE(first, nullptr);
  const auto second = HttpServer::Start({.address = first->address()});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(first->address()));
}

TEST(HttpServerTest, WhatIsNoAddressIsRefused) {
  for (const char* address : {"", "8080", ":8080", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
                              "127.0.0.1:80s", "127.0.0.1:0,127.0.0.1:0"}) {
    EXPECT_EQ(HttpServer::Start({.address = address}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
}

}  // namespace http_test
}  // namespace emberd::ops
