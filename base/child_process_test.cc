#include "base/child_process.h"

#include <fstream>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_descriptor.h"
#include "base/testing/await.h"

namespace emberd {
namespace child_process_test {

struct Pipe {
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    reader = FileDescriptor(ends[0]);
    writer = FileDescriptor(ends[1]);
  }
  // Until all writers are gone.
  std::string ReadAll() {
    writer.Close();
    std::string text;
    char buffer[256];
    for (ssize_t n; (n = read(reader.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
    return text;
  }
  FileDescriptor reader, writer;
};

std::unique_ptr<ChildProcess> StartShell(const std::string& script,
                                         const ChildProcess::Streams& streams = {}) {
  auto child = ChildProcess::Start({"/bin/sh", "-c", script}, streams);
  EXPECT_TRUE(child.ok()) << child.status();
  return child.ok() ? *std::move(child) : nullptr;
}

TEST(ChildProcessTest, ReportsHowItEnded) {
  const auto child = StartShell("exit 3");
  ASSERT_TRUE(child->WaitFor(kPatience));
  EXPECT_EQ(child->exit_status(), 3);
  EXPECT_EQ(child->End(), "exited with status 3");
  child->Signal(SIGKILL);  // nobody there: nothing happens
  child->Stop(absl::ZeroDuration());
  EXPECT_EQ(child->exit_status(), 3);
}

TEST(ChildProcessTest, AProgramThatIsNotThereEndsWith127) {
  auto child = ChildProcess::Start({"/no/such/program"});
  ASSERT_TRUE(child.ok()) << child.status();
  ASSERT_TRUE((*child)->WaitFor(kPatience));
  EXPECT_EQ((*child)->End(), "exited with status 127");
}

TEST(ChildProcessTest, ASignalEndsIt) {
  const auto child = StartShell("exec sleep 1000");
  EXPECT_FALSE(child->WaitFor(absl::Milliseconds(20)));
  child->Signal(SIGTERM);
  ASSERT_TRUE(child->WaitFor(kPatience));
  EXPECT_EQ(child->exit_status(), -SIGTERM);
  EXPECT_EQ(child->End(), "was killed by signal 15 (Terminated)");
}

TEST(ChildProcessTest, StopIsFollowedByKill) {
  Pipe pipe;
  const auto child =
      StartShell("trap '' TERM; echo; while :; do sleep 0.1; done", {.output = pipe.writer.get()});
  char byte;
  ASSERT_EQ(read(pipe.reader.get(), &byte, 1), 1);  // it ignores SIGTERM from here on
  child->Stop(absl::Milliseconds(100));
  EXPECT_FALSE(child->Running());
  EXPECT_EQ(child->End(), "was killed by signal 9 (Killed)");
}

TEST(ChildProcessTest, DoesNothingWhileSuspended) {
  Pipe pipe;
  ASSERT_EQ(fcntl(pipe.reader.get(), F_SETFL, O_NONBLOCK), 0);
  const auto child = StartShell("while true; do echo x; done", {.output = pipe.writer.get()});
  const auto drain = [&pipe] {
    size_t size = 0;
    char buffer[1 << 12];
    for (ssize_t n; (n = read(pipe.reader.get(), buffer, sizeof(buffer))) > 0;) size += n;
    return size;
  };
  child->Suspend();
  drain();
  EXPECT_FALSE(child->WaitFor(absl::Milliseconds(50)));
  EXPECT_EQ(drain(), 0u);
  child->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return drain() > 0; }));
  child->Suspend();  // a process that stands still can be killed, too
}

TEST(ChildProcessTest, EndsWithItsObject) {
  pid_t pid = 0;
  {
    const auto child = StartShell("exec sleep 1000");
    pid = child->pid();
    EXPECT_EQ(kill(pid, 0), 0);
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

// Blocked signals and descriptors are inherited over exec if nobody sees to it.
TEST(ChildProcessTest, StartsWithCleanSignals) {
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  const auto child = StartShell("exec sleep 1000");
  sigprocmask(SIG_SETMASK, &before, nullptr);
  child->Stop(kPatience);
  EXPECT_EQ(child->exit_status(), -SIGTERM);
}

TEST(ChildProcessTest, GetsItsStreamsAndNoOtherDescriptor) {
  Pipe output, error, extra, other;
  ASSERT_EQ(fcntl(other.writer.get(), F_SETFD, 0), 0);  // not closed by exec
  const auto child = StartShell(
      "cat; echo out; echo err >&2; echo extra >&3; ls /proc/self/fd | wc -l >&3",
      {.output = output.writer.get(), .error = error.writer.get(), .extra = extra.writer.get()});
  EXPECT_EQ(output.ReadAll(), "out\n");
  EXPECT_EQ(error.ReadAll(), "err\n");
  EXPECT_EQ(extra.ReadAll(), "extra\n5\n");  // 0 to 3, and that of `ls`
  EXPECT_TRUE(child->WaitFor(kPatience));
}

// Where the sources are the very numbers that the child's streams get.
TEST(ChildProcessTest, StreamsMayBeSwapped) {
  Pipe output, error;
  const pid_t pid = fork();
  if (pid == 0) {  // its standard streams are closed, so that the copies get low numbers
    dup2(output.writer.get(), STDERR_FILENO);
    dup2(error.writer.get(), STDOUT_FILENO);
    auto child = ChildProcess::Start({"/bin/sh", "-c", "echo out; echo err >&2"},
                                     {.output = STDERR_FILENO, .error = STDOUT_FILENO});
    _exit(child.ok() && (*child)->WaitFor(kPatience) ? 0 : 1);
  }
  EXPECT_EQ(output.ReadAll(), "out\n");
  EXPECT_EQ(error.ReadAll(), "err\n");
  waitpid(pid, nullptr, 0);
}

TEST(ChildProcessTest, StandardOutputOfTheParentStaysClean) {
  ::testing::internal::CaptureStdout();
  auto child = ChildProcess::Start({"/bin/sh", "-c", "echo noise"});
  ASSERT_TRUE(child.ok());
  EXPECT_TRUE((*child)->WaitFor(kPatience));
  EXPECT_EQ((*child)->End(), "exited with status 0");
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
}

// kill -9 of the launcher leaves it no chance to clean up: the kernel must.
TEST(ChildProcessTest, DiesWithItsParentWhateverHappens) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans come to this process
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    auto child = ChildProcess::Start({"/bin/sleep", "100"});
    const pid_t pid = child.ok() ? (*child)->pid() : 0;
    if (write(fds[1], &pid, sizeof(pid)) != sizeof(pid)) _exit(1);
    absl::SleepFor(absl::Seconds(100));
    _exit(0);
  }
  pid_t child = 0;
  ASSERT_EQ(read(fds[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  ASSERT_GT(child, 0);
  std::string program;
  while (program != "sleep") {  // until it has become the program
    std::ifstream(absl::StrCat("/proc/", child, "/comm")) >> program;
  }
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  close(fds[0]);
  close(fds[1]);
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST(ChildProcessTest, HearsOfAnEndWhereSigchldWasIgnoredAtTheStart) {
  const auto before = signal(SIGCHLD, SIG_IGN);
  const auto child = StartShell("exit 3");
  EXPECT_TRUE(child->WaitFor(kPatience));
  EXPECT_EQ(child->exit_status(), 3);
  signal(SIGCHLD, before);
}

}  // namespace child_process_test
}  // namespace emberd
