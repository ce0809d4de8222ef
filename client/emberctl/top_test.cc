// What top prints where there is no terminal, and how a frame fits a window. On a terminal:
// tests/integration/top_terminal_test.py.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/held_port.h"
#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/stats_view.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace top_test {

using ::emberd::client::testing::FakeService;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

TEST(TableTest, CutsAndColours) {
  const std::vector<CellLine> lines = {{"A", "LONG"}, {"word", Cell("bad\n", Style::kAlarm)}};
  EXPECT_THAT(LayOut(lines, /*colors=*/false), ElementsAre("A     LONG", "word  bad "));
  EXPECT_THAT(LayOut(lines, /*colors=*/false, 7), ElementsAre("A     L", "word  b"));
  EXPECT_THAT(LayOut(lines, /*colors=*/true, 7)[1], "word  \x1b[1;31mb\x1b[0m");
}

Rates TwoSeconds() { return RatesBetween(StatsAfter(10), StatsAfter(12)); }

TEST(TopFrameTest, FitsTheWindow) {
  const Rates rates = TwoSeconds();
  const std::vector<std::string> all = TopFrame(rates, "here:1", {});
  FrameOptions options;
  options.columns = 30;
  options.rows = 8;
  options.hint = "q: quit";
  const std::vector<std::string> frame = TopFrame(rates, "here:1", options);
  ASSERT_THAT(frame, SizeIs(8));
  for (const std::string& line : frame) EXPECT_LE(line.size(), 30u) << line;
  EXPECT_EQ(frame[6],
            absl::StrCat("... ", all.size() - 6, " more lines: arrow down, or j").substr(0, 30));
  EXPECT_EQ(frame[7], "q: quit");
  EXPECT_EQ(frame[5], all[5].substr(0, 30));
  EXPECT_EQ(LastScroll(rates, "here:1", options), static_cast<int>(all.size()) - 7);
  options.first = LastScroll(rates, "here:1", options);
  EXPECT_EQ(TopFrame(rates, "here:1", options)[6], all.back().substr(0, 30));
  EXPECT_THAT(TopFrame(rates, "here:1", options), SizeIs(8));
  options.first = 0;
  options.rows = 1;
  EXPECT_THAT(TopFrame(rates, "here:1", options), SizeIs(1));
  options.rows = 1000;
  EXPECT_THAT(TopFrame(rates, "here:1", options), SizeIs(all.size() + 1));
}

TEST(TopFrameTest, CountsExamplesAndHidesIdleMethods) {
  const auto lines = TopFrame(TwoSeconds(), "here:1", {});
  EXPECT_EQ(lines[2], "model ads: 51.2k examples/s");
  EXPECT_EQ(lines[3], "shard 1 does not answer: connection refused");
  for (const std::string& line : lines) EXPECT_THAT(line, Not(HasSubstr("ReadRows")));
}

TEST(TopFrameTest, SortsByWhatIsAsked) {
  v1::GetStatsResponse now = StatsAfter(12);
  // Rare and slow.
  v1::MethodStats* rare = now.mutable_methods(1);
  rare->clear_seconds();
  FillDistribution(3, rare->mutable_seconds());
  for (auto& bucket : *rare->mutable_seconds()->mutable_buckets()) {
    if (bucket.upper() < 1) bucket.set_count(bucket.upper() < 0.01 ? 0 : 1);
  }
  const Rates rates = RatesBetween(StatsAfter(10), now);
  const auto first_method = [&](Order order) {
    FrameOptions options;
    options.order = order;
    return TopFrame(rates, "here:1", options)[6];
  };
  EXPECT_THAT(first_method(Order::kBusy), HasSubstr("Lookup"));
  EXPECT_THAT(first_method(Order::kSlow), HasSubstr("ReadRows"));
  EXPECT_THAT(first_method(Order::kName), HasSubstr("Lookup"));
}

TEST(TopFrameTest, ShardsThatAreDownStandFirst) {
  FrameOptions options;
  options.colors = true;
  const auto lines = TopFrame(TwoSeconds(), "here:1", options);
  const auto down = std::find_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find("DOWN") != std::string::npos;
  });
  ASSERT_NE(down, lines.end());
  EXPECT_THAT(*down, HasSubstr("\x1b[1;31mDOWN\x1b[0m"));
  EXPECT_THAT(*(down - 1), HasSubstr("SHARD"));
}

TEST(TopTest, PrintsPlainFrames) {
  FakeService service;
  service.stats = {StatsAfter(10), StatsAfter(12), StatsAfter(13)};
  const Outcome top =
      Emberctl({"top", "-a", service.address(), "--interval", "0.1", "--count", "2"});
  ASSERT_EQ(top.code, kOk) << top.err;
  EXPECT_THAT(top.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(top.out, AllOf(HasSubstr("up 12s"), HasSubstr("up 13s"), Not(HasSubstr("up 10s"))));
  EXPECT_THAT(top.out, HasSubstr("EmbeddingService/Lookup  100 "));
}

TEST(TopTest, WritesAnObjectALine) {
  FakeService service;
  service.stats = {StatsAfter(10), StatsAfter(12), StatsAfter(1), StatsAfter(4)};
  const Outcome top =
      Emberctl({"top", "-a", service.address(), "--interval", "0.1", "--count", "2", "--json"});
  ASSERT_EQ(top.code, kOk) << top.err;
  const std::vector<std::string> lines = absl::StrSplit(top.out, '\n', absl::SkipEmpty());
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(Json::parse(lines[0])["seconds"], 2.0f);
  // The coordinator restarted in between; what came before its second answer is left out.
  EXPECT_EQ(Json::parse(lines[1])["seconds"], 3.0f);
  EXPECT_EQ(Json::parse(lines[1])["methods"][0]["per_second"], 100.0f);
}

TEST(TopTest, NobodyThere) {
  const auto port = *HeldPort::Take();
  const std::string& gone = port->address();
  EXPECT_EQ(Emberctl({"top", "-a", gone, "--timeout", "0.2"}).code, kUnreachable);
}

}  // namespace top_test
}  // namespace emberd::emberctl
