// Runs the demo as a newcomer does, as a process with all its processes. It would catch what no
// unit test can: children that stay behind, a run that hangs when something dies, and a cluster
// that does not compute what one process does.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/child_process.h"
#include "base/file_descriptor.h"
#include "base/temp_dir.h"
#include "base/testing/paths.h"
#include "client/cpp/client.h"
#include "tests/bench/demo/cluster.h"

namespace emberd::demo {
namespace demo_test {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

constexpr absl::Duration kTimeout = absl::Minutes(4);
constexpr char kLastLine[] =
    "demo: auc=0\\.[0-9]{4} best_auc=[01]\\.[0-9]{4} examples_per_s=[0-9]+ "
    "table_sha256=[0-9a-f]{64}";

class DemoTest : public testing::Test {
 protected:
  void Start(const std::string& name, const std::vector<std::string>& arguments) {
    out_ = TempPath(name);
    log_ = out_ + ".txt";
    const FileDescriptor log(
        open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
    std::vector<std::string> command = {BuildPath("bin/emberd_demo"), "--out", out_};
    command.insert(command.end(), arguments.begin(), arguments.end());
    auto child = ChildProcess::Start(command, {.output = log.get(), .error = log.get()});
    ASSERT_TRUE(child.ok()) << child.status();
    demo_ = *std::move(child);
  }

  std::string Output() const {
    std::ostringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }
  // Waits until the output contains `text`, or the demo has ended.
  void AwaitOutput(const std::string& text) {
    const absl::Time deadline = absl::Now() + kTimeout;
    while (Output().find(text) == std::string::npos && demo_->Running() && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    ASSERT_THAT(Output(), HasSubstr(text));
  }
  // The values of a field of the cluster's ready line; none before there is one.
  std::vector<std::string> ServerField(const std::string& field) const {
    const std::string output = Output();
    const size_t ready = output.find("emberd: ready ");
    if (ready == std::string::npos) return {};
    return absl::StrSplit(FieldOf(output.substr(ready, output.find('\n', ready) - ready), field),
                          ',');
  }
  std::vector<pid_t> ServerPids() const {
    std::vector<pid_t> pids;
    for (const std::string& pid : ServerField("pids")) {
      pids.emplace_back();
      EXPECT_TRUE(absl::SimpleAtoi(pid, &pids.back()));
    }
    return pids;
  }
  // Trainers are the demo's own children, like the cluster's supervisor.
  std::vector<pid_t> Children() const {
    std::ifstream children(
        absl::StrCat("/proc/", demo_->pid(), "/task/", demo_->pid(), "/children"));
    std::vector<pid_t> pids;
    for (pid_t pid; children >> pid;) pids.push_back(pid);
    return pids;
  }
  static void AwaitEnd(const std::vector<pid_t>& pids) {
    const absl::Time deadline = absl::Now() + kTimeout;
    for (pid_t pid : pids) {
      while (kill(pid, 0) == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(20));
      EXPECT_EQ(kill(pid, 0), -1) << "process " << pid << " is left behind";
    }
  }
  // The last line of a run that ended well and left no process.
  std::string Finish(const std::string& end = "exited with status 0") {
    EXPECT_TRUE(demo_->WaitFor(kTimeout)) << Output();
    EXPECT_EQ(demo_->End(), end) << Output();
    for (pid_t pid : ServerPids())
      EXPECT_EQ(kill(pid, 0), -1) << "process " << pid << " is left behind";
    const std::vector<std::string> lines = absl::StrSplit(Output(), '\n', absl::SkipEmpty());
    return lines.empty() ? "" : lines.back();
  }

  // The last line of the run of kRun that nobody disturbs, which is made once.
  std::string Undisturbed() {
    static std::string line;
    if (line.empty()) {
      Start("undisturbed", kRun);
      line = Finish();
    }
    return line;
  }

  const std::vector<std::string> kRun = {"--quick", "--examples", "60000"};
  std::string out_, log_;
  std::unique_ptr<ChildProcess> demo_;
};

TEST_F(DemoTest, EndsWithItsLineAndLeavesItsCurve) {
  Start("small", {"--quick", "--examples", "20000"});
  EXPECT_THAT(Finish(), MatchesRegex(kLastLine));
  EXPECT_THAT(Output(), HasSubstr("best reachable AUC"));
  std::ifstream csv(out_ + "/curve.csv"), svg(out_ + "/curve.svg");
  std::string line;
  EXPECT_TRUE(std::getline(csv, line) && line == "examples,seconds,loss,auc,held_out_auc");
  int points = 0;
  while (std::getline(csv, line)) ++points;
  EXPECT_EQ(points, 5);
  EXPECT_TRUE(std::getline(svg, line) && line.substr(0, 4) == "<svg");
}

TEST_F(DemoTest, TablesDoNotDependOnMinibatches) {
  std::vector<std::string> checksums;
  for (const char* limits : {"none", "tight"}) {
    Start(absl::StrCat("limits_", limits), {"--quick", "--examples", "6000", "--limits", limits});
    checksums.push_back(FieldOf(Finish(), "table_sha256"));
    const bool one = Output().find("mini-batches of a step     1.00") != std::string::npos;
    EXPECT_EQ(one, limits == std::string("none")) << Output();
  }
  EXPECT_EQ(checksums[0], checksums[1]);
}

// A synchronous group is one trainer that has all of its batch, on however many coordinators and
// shards.
TEST_F(DemoTest, TablesDoNotDependOnTheNumbersOfShardsAndTrainers) {
  struct Layout {
    const char *shards, *sparsecores, *coordinators, *trainers, *batch;
  };
  const std::vector<Layout> layouts = {
      {"1", "8", "1", "1", "1024"}, {"4", "2", "2", "4", "256"}, {"2", "4", "2", "2", "512"}};
  for (const bool pipelined : {false, true}) {
    std::string expected;
    for (const Layout& layout : layouts) {
      if (pipelined && &layout == &layouts.back()) break;  // two tell
      std::vector<std::string> arguments = {
          "--quick",       "--examples",       "6000",           "--shards",          layout.shards,
          "--sparsecores", layout.sparsecores, "--coordinators", layout.coordinators, "--trainers",
          layout.trainers, "--batch",          layout.batch};
      if (pipelined) arguments.push_back("--pipelined");
      Start(absl::StrCat("trainers", layout.trainers, pipelined), arguments);
      const std::string checksum = FieldOf(Finish(), "table_sha256");
      if (expected.empty()) expected = checksum;
      EXPECT_EQ(checksum, expected);
    }
  }
}

TEST_F(DemoTest, GroupsMayBeAsynchronous) {
  for (const char* consistency : {"async", "bounded:2"}) {
    Start(consistency, {"--quick", "--examples", "6000", "--consistency", consistency});
    EXPECT_THAT(Finish(), MatchesRegex(kLastLine));
  }
}

TEST_F(DemoTest, MeetsThePlainRunOnFiles) {
  Start("movielens",
        {"--data", SourcePath("tests/data/movielens"), "--examples", "500", "--batch", "4"});
  const std::string line = Finish();
  EXPECT_THAT(line, MatchesRegex(kLastLine));
  EXPECT_EQ(FieldOf(line, "auc"), FieldOf(line, "best_auc"));
  EXPECT_THAT(Output(), HasSubstr("AUC of the plain run"));
}

TEST_F(DemoTest, GoesOnAfterAShardIsKilled) {
  Start("kill", kRun);
  AwaitOutput(" examples  ");  // it trains
  const std::vector<pid_t> pids = ServerPids();
  ASSERT_EQ(pids.size(), 6u);
  ASSERT_EQ(kill(pids[3], SIGKILL), 0);
  // It comes back without its rows, and training waits for the operator's word.
  AwaitOutput("waits: DATA_LOSS: model ");
  client::ClientOptions options;
  options.addresses = {ServerField("coordinator").front()};
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto status = (*client)->GetStatus();
  ASSERT_TRUE(status.ok() && status->models.size() == 1) << status.status();
  const absl::Status reset = (*client)->ResetModel(status->models[0].name);
  EXPECT_TRUE(reset.ok()) << reset;
  client->reset();
  EXPECT_THAT(Finish(), MatchesRegex(kLastLine));
  EXPECT_THAT(Output(), HasSubstr("goes on after "));
  EXPECT_THAT(Output(), HasSubstr("[####################] 100%"));
}

// On a cluster that somebody else runs, whose shards keep a log: nothing is lost with the process.
TEST_F(DemoTest, ARunningClusterThatLosesAShardEndsWithTheTablesOfAnUndisturbedRun) {
  const std::string expected = FieldOf(Undisturbed(), "table_sha256");

  const TempDir folder = *TempDir::Create();
  const std::string output = folder.path() + "/emberd.txt";
  const FileDescriptor log(open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  const auto cluster = ChildProcess::Start(
      {BuildPath("bin/emberd"), "up", "--processes", "--shards", "4", "--sparsecores", "2",
       "--listen", "127.0.0.1:0", "--http", "", "--data", folder.path(), "--durability", "log"},
      {.output = log.get(), .error = log.get()});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::string ready;
  for (const absl::Time end = absl::Now() + kTimeout; ready.empty() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(20));
    std::ifstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      if (absl::StartsWith(line, "emberd: ready ")) ready = line;
    }
  }
  std::vector<std::string> disturbed = kRun;
  disturbed.insert(disturbed.end(), {"--cluster", FieldOf(ready, "coordinator")});
  Start("running", disturbed);
  AwaitOutput(" examples  ");
  const std::vector<std::string> pids = absl::StrSplit(FieldOf(ready, "pids"), ',');
  pid_t shard = 0;
  ASSERT_TRUE(pids.size() == 5 && absl::SimpleAtoi(pids[3], &shard)) << ready;
  ASSERT_EQ(kill(shard, SIGKILL), 0);
  EXPECT_EQ(FieldOf(Finish(), "table_sha256"), expected);
  // Whether a trainer notices depends on how long the shard took: its step may simply wait.
  EXPECT_THAT(Output(), ContainsRegex("shard 2 [^\n]+, 1 restarts"));

  // Rows that were trained before are no start for a run.
  Start("again", disturbed);
  Finish("exited with status 1");
  EXPECT_THAT(Output(), HasSubstr("emberctl model drop click_log"));
  (*cluster)->Stop(kTimeout);  // it removes its temporary files
}

// Both, for on a busy machine trainer 1 may have turned to the first when it began.
TEST_F(DemoTest, GoesOnAfterItsCoordinatorsAreKilled) {
  Start("coordinator", kRun);
  AwaitOutput(" examples  ");
  const std::vector<pid_t> pids = ServerPids();
  ASSERT_EQ(pids.size(), 6u);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(kill(pids[i], SIGKILL), 0);
  EXPECT_THAT(Finish(), MatchesRegex(kLastLine));
  EXPECT_THAT(Output(), HasSubstr("trainer 1 waits: "));
  EXPECT_THAT(Output(), HasSubstr("goes on after "));
}

TEST_F(DemoTest, ReplacesATrainerThatIsKilled) {
  Start("trainer", kRun);
  AwaitOutput(" examples  ");
  pid_t trainer = 0;
  // The one of rank 1 has it on its command line.
  for (pid_t pid : Children()) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/cmdline"));
    std::string command;
    std::getline(file, command);
    if (command.find(std::string("--rank\0"
                                 "1\0",
                                 9)) != std::string::npos)
      trainer = pid;
  }
  ASSERT_NE(trainer, 0);
  ASSERT_EQ(kill(trainer, SIGKILL), 0);
  EXPECT_THAT(Finish(), MatchesRegex(kLastLine));
  EXPECT_THAT(Output(),
              HasSubstr("trainer 1 was killed by signal 9 (Killed); it is started again"));
  EXPECT_THAT(Output(), HasSubstr("trainer 0 goes on after "));
  EXPECT_THAT(Output(), HasSubstr("[####################] 100%"));
}

TEST_F(DemoTest, StopsEverythingOnSigint) {
  Start("sigint", {});
  AwaitOutput(" examples  ");
  ASSERT_EQ(kill(demo_->pid(), SIGINT), 0);
  EXPECT_EQ(Finish("exited with status 130"), "emberd_demo: stopped");
}

TEST_F(DemoTest, ItsOwnDeathTakesTheClusterAlong) {
  // What is killed cannot clean up, so its temporary files lie in a folder of the test.
  const TempDir folder = *TempDir::Create();
  const std::string usual = std::filesystem::temp_directory_path();
  setenv("TMPDIR", folder.path().c_str(), /*overwrite=*/1);
  Start("sigkill", {});
  setenv("TMPDIR", usual.c_str(), /*overwrite=*/1);
  AwaitOutput(" examples  ");
  const std::vector<pid_t> pids = ServerPids();
  ASSERT_EQ(kill(demo_->pid(), SIGKILL), 0);
  AwaitEnd(pids);
}

// All processes die at once, in the middle of training: what is on the disk then must be enough to
// end with the tables, and the dense part, of a run that was never disturbed. With other shards.
TEST_F(DemoTest, GoesOnFromItsCheckpointAfterEverythingWasKilled) {
  const std::string expected = Undisturbed();

  const TempDir folder = *TempDir::Create();
  const std::string usual = std::filesystem::temp_directory_path();
  setenv("TMPDIR", folder.path().c_str(), /*overwrite=*/1);
  std::vector<std::string> saving = kRun;
  saving.insert(saving.end(), {"--checkpoint-every", "4"});
  Start("resumed", saving);
  setenv("TMPDIR", usual.c_str(), /*overwrite=*/1);
  AwaitOutput("has saved checkpoint step-");
  std::vector<pid_t> pids = ServerPids();
  for (pid_t pid : Children()) pids.push_back(pid);
  ASSERT_EQ(pids.size(), 9u);  // with the supervisor and two trainers
  pids.insert(pids.begin(), demo_->pid());
  for (pid_t pid : pids) kill(pid, SIGKILL);
  ASSERT_TRUE(demo_->WaitFor(kTimeout));
  AwaitEnd({pids.begin() + 1, pids.end()});
  ASSERT_THAT(Output(), Not(HasSubstr("table_sha256")));

  Start("resumed", {"--resume", "--shards", "2", "--sparsecores", "4"});
  const std::string resumed = Finish();
  EXPECT_THAT(Output(), HasSubstr("goes on from checkpoint step-"));
  for (const char* field : {"auc", "best_auc", "table_sha256"}) {
    EXPECT_EQ(FieldOf(resumed, field), FieldOf(expected, field)) << Output();
  }
}

TEST_F(DemoTest, WithoutACheckpointThereIsNothingToGoOnFrom) {
  Start("nothing", {"--resume"});
  EXPECT_THAT(Finish("exited with status 1"), HasSubstr("--checkpoint-every N"));
}

TEST_F(DemoTest, AModelThatIsNotGoodEnoughFails) {
  Start("bad", {"--quick", "--examples", "6000", "--max-gap", "0.0001"});
  EXPECT_THAT(Finish("exited with status 1"), MatchesRegex(kLastLine));
  EXPECT_THAT(Output(), HasSubstr("NOT GOOD ENOUGH"));
}

TEST_F(DemoTest, ServerThatDoesNotStartIsAnError) {
  Start("three", {"--shards", "3"});
  EXPECT_THAT(Finish("exited with status 1"), HasSubstr("must be a power of two"));
}

}  // namespace demo_test
}  // namespace emberd::demo
