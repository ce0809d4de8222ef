// A cluster on one machine is only as good as its babysitter: these tests catch children that
// outlive their parent, a dead shard that stays dead, a stop that hangs on a child that ignores
// SIGTERM, shards that go before the coordinator that still needs them, and a ready file of an
// earlier run that is taken for this one's. The children are shell scripts.
#include "server/launcher/supervisor.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"

namespace emberd::launcher {
namespace supervisor_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorOptions Options() {
    SupervisorOptions options;
    options.stop_requested = [this](absl::Duration limit) {
      absl::SleepFor(std::min(limit, absl::Milliseconds(5)));
      return stop_();
    };
    options.min_backoff = absl::Milliseconds(5);
    options.max_backoff = absl::Milliseconds(20);
    options.stop_timeout = absl::Minutes(2);
    return options;
  }

  std::string Path(const std::string& file) const { return directory_.path() + "/" + file; }

  // A process that runs `setup`, says that it serves, and goes on with `body`.
  ProcessSpec Script(const std::string& name, const std::string& body,
                     const std::string& setup = ":", int stage = 0) {
    const std::string file = Path(name);
    const std::string ready = absl::StrCat("printf 'grpc=127.0.0.1:1\\nhttp=\\npid=%d\\n' $$ > ",
                                           file, ".tmp && mv ", file, ".tmp ", file);
    return {.name = name,
            .argv = {"/bin/sh", "-c", absl::StrCat(setup, "; ", ready, "; ", body)},
            .ready_file = file,
            .stage = stage};
  }

  std::string Read(const std::string& file) const {
    std::stringstream content;
    content << std::ifstream(Path(file)).rdbuf();
    return content.str();
  }

  std::function<bool()> stop_ = [] { return false; };
  const TempDir directory_ = TempDir::Create().value();
};

TEST_F(SupervisorTest, NamesAProcessThatWasKilledForMemory) {
  SupervisorOptions options = Options();
  int64_t kills = 3;
  options.memory_kills = [&kills] { return MemoryKills{.cgroup = kills}; };
  options.memory_advice = "set less";
  options.restart = false;
  for (const bool for_memory : {true, false}) {
    Supervisor supervisor(options);
    const auto process = supervisor.Start(Script("shard-0", "exec sleep 100"));
    ASSERT_TRUE(process.ok() && supervisor.WaitReady(*process).ok());
    if (for_memory) ++kills;
    ::testing::internal::CaptureStderr();
    kill(supervisor.pid(*process), SIGKILL);
    EXPECT_EQ(supervisor.Run().code(), absl::StatusCode::kUnavailable);
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, HasSubstr("was killed by signal 9 (Killed)"));
    const auto named = HasSubstr("the kernel killed it because memory ran out");
    if (for_memory) {
      EXPECT_THAT(log, AllOf(named, HasSubstr("set less")));
    } else {
      EXPECT_THAT(log, Not(named));
    }
  }
}

// Of another process, long before.
TEST_F(SupervisorTest, AKillForMemoryIsForgottenInTime) {
  SupervisorOptions options = Options();
  int looks = 0;
  options.memory_kills = [&looks] { return MemoryKills{.machine = looks++ == 0 ? 0 : 1}; };
  options.look_at_kills_every = absl::ZeroDuration();
  options.restart = false;
  Supervisor supervisor(options);
  const auto process = supervisor.Start(Script("shard-0", "exec sleep 100"));
  ASSERT_TRUE(process.ok() && supervisor.WaitReady(*process).ok());
  stop_ = [&] {
    if (looks >= 3 && supervisor.pid(*process) != 0) kill(supervisor.pid(*process), SIGKILL);
    return false;
  };
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(supervisor.Run().code(), absl::StatusCode::kUnavailable);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("was killed by signal 9 (Killed)"));
  EXPECT_THAT(log, Not(HasSubstr("memory ran out")));
}

TEST_F(SupervisorTest, RestartsWhatDiesAndStopsOnRequest) {
  Supervisor supervisor(Options());
  const auto process = supervisor.Start(Script("shard-0", "exec sleep 100"));
  ASSERT_TRUE(process.ok()) << process.status();
  const auto ready = supervisor.WaitReady(*process);
  ASSERT_TRUE(ready.ok()) << ready.status();
  const pid_t first = supervisor.pid(*process);
  EXPECT_EQ(ready->pid, first);
  kill(first, SIGKILL);
  stop_ = [&] {  // once the second run says that it serves
    const auto again = ReadReadyFile(Path("shard-0"));
    return again.ok() && again->pid != first;
  };
  EXPECT_TRUE(supervisor.Run().ok());
  EXPECT_EQ(supervisor.restarts(), 1);
  EXPECT_NE(supervisor.pid(*process), first);
  const pid_t second = supervisor.pid(*process);
  supervisor.Stop().IgnoreError();
  EXPECT_EQ(supervisor.pid(*process), 0);
  EXPECT_EQ(kill(second, 0), -1);
}

TEST_F(SupervisorTest, KeepsRestartingWhatNeverLives) {
  Supervisor supervisor(Options());
  ASSERT_TRUE(supervisor.Start(Script("shard-0", "exit 3")).ok());
  stop_ = [&] { return supervisor.restarts() >= 5; };
  EXPECT_TRUE(supervisor.Run().ok());
}

TEST_F(SupervisorTest, WithoutRestartItEndsWhenAllAreDead) {
  SupervisorOptions options = Options();
  options.restart = false;
  Supervisor supervisor(options);
  ASSERT_TRUE(supervisor.Start(Script("shard-0", "exit 0")).ok());
  ASSERT_TRUE(supervisor.Start(Script("shard-1", "exit 0")).ok());
  EXPECT_EQ(supervisor.Run().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(supervisor.restarts(), 0);
}

TEST_F(SupervisorTest, WaitReadySaysWhatWentWrong) {
  SupervisorOptions options = Options();
  options.ready_timeout = kPatience;
  Supervisor supervisor(options);
  options.ready_timeout = absl::Milliseconds(300);
  Supervisor impatient(options);
  const auto dies = supervisor.Start(Script("shard-0", ":", "exit 1"));
  const auto wrong = supervisor.Start(Script("coordinator-0", ":", "exit 2"));
  const auto killed = supervisor.Start(Script("shard-1", ":", "kill -9 $$"));
  const auto hangs = impatient.Start(Script("shard-2", ":", "exec sleep 100"));
  const auto missing =
      supervisor.Start({.name = "x", .argv = {"/no/such"}, .ready_file = Path("x")});
  ASSERT_TRUE(dies.ok() && wrong.ok() && killed.ok() && hangs.ok() && missing.ok());
  const auto message = [&](int process, absl::StatusCode code, Supervisor* of = nullptr) {
    const absl::Status status = (of == nullptr ? &supervisor : of)->WaitReady(process).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message(*dies, absl::StatusCode::kUnavailable),
            "shard-0 exited with status 1 before it was ready");
  EXPECT_EQ(message(*wrong, absl::StatusCode::kInvalidArgument),
            "coordinator-0 exited with status 2 before it was ready");
  EXPECT_EQ(message(*killed, absl::StatusCode::kUnavailable),
            "shard-1 was killed by signal 9 (Killed) before it was ready");
  EXPECT_THAT(message(*hangs, absl::StatusCode::kDeadlineExceeded, &impatient),
              HasSubstr("shard-2"));
  EXPECT_THAT(message(*missing, absl::StatusCode::kUnavailable), HasSubstr("status 127"));
  stop_ = [] { return true; };
  EXPECT_EQ(impatient.WaitReady(*hangs).status().code(), absl::StatusCode::kCancelled);
}

TEST_F(SupervisorTest, AnEarlierRunsReadyFileDoesNotCount) {
  Supervisor supervisor(Options());
  // The process itself puts back a file with another pid, as a slow earlier run might.
  ProcessSpec spec = Script(
      "shard-0", "exec sleep 100",
      absl::StrCat("printf 'grpc=a:1\\nhttp=\\npid=1\\n' > ", Path("shard-0"), "; sleep 0.2"));
  const auto process = supervisor.Start(spec);
  ASSERT_TRUE(process.ok());
  const auto ready = supervisor.WaitReady(*process);
  ASSERT_TRUE(ready.ok()) << ready.status();
  EXPECT_EQ(ready->grpc, "127.0.0.1:1");
}

// One that has opened its log, but does not serve yet, would go on in a file that was moved away.
TEST_F(SupervisorTest, AHangupReachesAProcessThatIsBeingStartedAgain) {
  SupervisorOptions options = Options();
  bool hangup = false;
  options.take_hangup = [&hangup] { return std::exchange(hangup, false); };
  Supervisor supervisor(options);
  // From its second start on, it waits until the hangup was taken.
  const std::string setup =
      absl::StrCat("trap 'echo >> ", Path("hangups"), "' HUP; if [ -e ", Path("once"),
                   " ]; then touch ", Path("again"), "; while [ ! -e ", Path("go"),
                   " ]; do sleep 0.01; done; fi; touch ", Path("once"));
  const auto process = supervisor.Start(Script("shard-0", "while :; do sleep 0.01; done", setup));
  ASSERT_TRUE(process.ok() && supervisor.WaitReady(*process).ok());
  kill(supervisor.pid(*process), SIGKILL);
  bool given = false;
  const absl::Time end = absl::Now() + kPatience;
  stop_ = [&] {
    if (!given && std::filesystem::exists(Path("again"))) given = hangup = true;
    if (given && !hangup) std::ofstream(Path("go")).flush();
    return std::filesystem::exists(Path("hangups")) || absl::Now() > end;
  };
  EXPECT_TRUE(supervisor.Run().ok());
  EXPECT_TRUE(std::filesystem::exists(Path("hangups")));
}

TEST_F(SupervisorTest, HigherStagesStopFirst) {
  Supervisor supervisor(Options());
  const auto script = [&](const std::string& name, int stage) {
    return Script(
        name, "while :; do sleep 0.02; done",
        absl::StrCat("trap 'sleep 0.1; echo ", name, " >> ", Path("order"), "; exit 0' TERM"),
        stage);
  };
  ASSERT_TRUE(supervisor.Start(script("shard-0", 0)).ok());
  ASSERT_TRUE(supervisor.Start(script("coordinator-0", 1)).ok());
  ASSERT_TRUE(supervisor.WaitReady(0).ok());
  ASSERT_TRUE(supervisor.WaitReady(1).ok());
  EXPECT_TRUE(supervisor.Stop().ok());
  EXPECT_EQ(Read("order"), "coordinator-0\nshard-0\n");
}

TEST_F(SupervisorTest, KillsWhatIgnoresSigterm) {
  SupervisorOptions options = Options();
  options.stop_timeout = absl::Milliseconds(200);
  Supervisor supervisor(options);
  ASSERT_TRUE(
      supervisor.Start(Script("shard-0", "while :; do sleep 0.02; done", "trap '' TERM")).ok());
  ASSERT_TRUE(supervisor.WaitReady(0).ok());
  const pid_t pid = supervisor.pid(0);
  // What it had not saved is lost, so that nobody may take this for a clean end.
  const absl::Status stopped = supervisor.Stop();
  EXPECT_EQ(stopped.code(), absl::StatusCode::kUnavailable) << stopped;
  EXPECT_THAT(std::string(stopped.message()),
              HasSubstr("shard-0 was killed, as it did not end in time; "));
  EXPECT_EQ(kill(pid, 0), -1);
}

// Would catch: a script that goes on as if all had been saved.
TEST_F(SupervisorTest, NamesWhatEndsWithAnError) {
  Supervisor supervisor(Options());
  const auto start = [&](const std::string& name, const std::string& at_term, int stage) {
    const std::string trap = absl::StrCat("trap '", at_term, "' TERM");
    const auto process =
        supervisor.Start(Script(name, "while :; do sleep 0.02; done", trap, stage));
    ASSERT_TRUE(process.ok() && supervisor.WaitReady(*process).ok());
  };
  ASSERT_NO_FATAL_FAILURE(start("shard-0", "exit 0", 0));
  ASSERT_NO_FATAL_FAILURE(start("shard-1", "exit 1", 0));
  ASSERT_NO_FATAL_FAILURE(start("coordinator-0", "kill -ABRT $$", 1));
  const absl::Status stopped = supervisor.Stop();
  EXPECT_EQ(stopped.code(), absl::StatusCode::kUnavailable) << stopped;
  EXPECT_EQ(
      stopped.message(),
      "coordinator-0 was killed by signal 6 (Aborted), shard-1 exited with status 1; what was "
      "not saved may be lost");
}

}  // namespace supervisor_test
}  // namespace emberd::launcher
