// The test library's own test: a process that is not killed, or a number that is misread, would
// make other tests pass.
#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "base/testing/http_get.h"
#include "base/testing/paths.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/ops/http.h"
#include "tests/testing/metrics.h"
#include "tests/testing/process.h"
#include "tests/testing/relay.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace testing_test {

TEST(ProcessTest, AppendsOutputAndErrorToItsLog) {
  const std::string log = TempPath("log");
  WriteFile(log, "before\n");
  auto process = StartProcess({"/bin/sh", "-c", "echo out; echo err >&2; exit 3"}, log);
  ASSERT_TRUE(process.ok()) << process.status();
  ASSERT_TRUE((*process)->WaitFor(absl::Minutes(2)));
  EXPECT_EQ((*process)->exit_status(), 3);
  EXPECT_EQ(ReadFile(log), "before\nout\nerr\n");
}

// A relay that lost what it held up, or passed it on, would let other tests see no fault at all.
TEST(RelayTest, PassesOnHoldsUpAndBreaks) {
  const auto server = ops::HttpServer::Start(
      {.address = "127.0.0.1:0", .routes = {ops::HealthRoute([] { return true; })}});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto relay = Relay::Start((*server)->address());
  ASSERT_TRUE(relay.ok()) << relay.status();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi((*relay)->address().substr(10), &port));
  EXPECT_THAT(HttpGet(port, "/healthz"), ::testing::EndsWith("serving\n"));

  (*relay)->Stall();
  HttpConnection held(port);
  EXPECT_TRUE(held.Send("GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
  absl::SleepFor(absl::Milliseconds(200));
  (*relay)->Heal();
  EXPECT_THAT(held.ReadAll(), ::testing::EndsWith("serving\n"));

  HttpConnection broken(port);
  EXPECT_TRUE(broken.Send("GET /healthz HTTP/1.1\r\n"));
  (*relay)->Cut();
  EXPECT_EQ(broken.ReadAll(), "");
  EXPECT_EQ(HttpGet(port, "/healthz"), "");
  (*relay)->Heal();
  EXPECT_THAT(HttpGet(port, "/healthz"), ::testing::EndsWith("serving\n"));
}

TEST(MetricSumTest, SumsTheSeriesOfOneName) {
  const std::string page =
      "# HELP requests Some\n# TYPE requests gauge\n"
      "requests{server=\"a\"} 2\nrequests{server=\"b\"} 0.5\nrequests_total 40\nplain 7\n";
  EXPECT_EQ(MetricSum(page, "requests"), 2.5);
  EXPECT_EQ(MetricSum(page, "requests", "server=\"b\""), 0.5);
  EXPECT_EQ(MetricSum(page, "plain"), 7);
  EXPECT_EQ(MetricSum(page, "none"), 0);
  EXPECT_EQ(FetchMetrics("127.0.0.1:1"), "");
}

TEST(MixedBatchTest, IsAFunctionOfItsSeed) {
  const auto first = MixedBatch(1, 20), again = MixedBatch(1, 20), other = MixedBatch(2, 20);
  ASSERT_EQ(first.size(), MixedModel("m").features.size());
  bool differs = false;
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].feature, MixedModel("m").features[i].name);
    EXPECT_EQ(first[i].wide, again[i].wide);
    EXPECT_EQ(first[i].narrow, again[i].narrow);
    EXPECT_EQ(first[i].weights, again[i].weights);
    differs = differs || first[i].wide != other[i].wide;
  }
  EXPECT_TRUE(differs);
}

}  // namespace testing_test
}  // namespace emberd::testing
