// The test library's own test: a process that is not killed, or a number that is misread, would
// make other tests pass.
#include <memory>
#include <string>

#include <signal.h>

#include "absl/time/clock.h"
#include "base/testing/paths.h"
#include "gtest/gtest.h"
#include "tests/testing/metrics.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace {

std::string LogPath(const std::string& name) {
  const std::string path = TempPath(name);
  WriteFile(path, "");
  return path;
}

TEST(ProcessTest, KeepsLogAndExitStatus) {
  absl::StatusOr<std::unique_ptr<Process>> process =
      Process::Start({"/bin/sh", "-c", "echo out; echo err >&2; exit 3"}, LogPath("exit"));
  ASSERT_TRUE(process.ok()) << process.status();
  ASSERT_TRUE((*process)->WaitFor(absl::Seconds(20)));
  EXPECT_EQ((*process)->exit_status(), 3);
  EXPECT_EQ(ReadFile((*process)->log_path()), "out\nerr\n");
  (*process)->Signal(SIGKILL);  // nobody there: nothing happens
}

TEST(ProcessTest, ASignalEndsIt) {
  absl::StatusOr<std::unique_ptr<Process>> process =
      Process::Start({"/bin/sleep", "1000"}, LogPath("signal"));
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_FALSE((*process)->WaitFor(absl::Milliseconds(20)));
  (*process)->Signal(SIGTERM);
  ASSERT_TRUE((*process)->WaitFor(absl::Seconds(20)));
  EXPECT_EQ((*process)->exit_status(), -SIGTERM);
}

TEST(ProcessTest, DoesNothingWhileSuspended) {
  absl::StatusOr<std::unique_ptr<Process>> process =
      Process::Start({"/bin/sh", "-c", "while true; do echo x; done"}, LogPath("suspend"));
  ASSERT_TRUE(process.ok()) << process.status();
  (*process)->Suspend();
  const std::string log = ReadFile((*process)->log_path());
  EXPECT_FALSE((*process)->WaitFor(absl::Milliseconds(50)));
  EXPECT_EQ(ReadFile((*process)->log_path()), log);
  (*process)->Signal(SIGCONT);
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (ReadFile((*process)->log_path()) == log && absl::Now() < until) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_NE(ReadFile((*process)->log_path()), log);
  (*process)->Suspend();  // a process that stands still can be killed, too
}

TEST(ProcessTest, EndsWithItsObject) {
  pid_t pid = 0;
  {
    absl::StatusOr<std::unique_ptr<Process>> process =
        Process::Start({"/bin/sleep", "1000"}, LogPath("end"));
    ASSERT_TRUE(process.ok()) << process.status();
    pid = (*process)->pid();
    EXPECT_EQ(kill(pid, 0), 0);
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST(ProcessTest, AProgramThatIsNotThereEndsWith127) {
  absl::StatusOr<std::unique_ptr<Process>> process =
      Process::Start({"/no/such/program"}, LogPath("none"));
  ASSERT_TRUE(process.ok()) << process.status();
  ASSERT_TRUE((*process)->WaitFor(absl::Seconds(20)));
  EXPECT_EQ((*process)->exit_status(), 127);
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

}  // namespace
}  // namespace emberd::testing
