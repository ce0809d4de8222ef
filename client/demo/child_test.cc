#include "client/demo/child.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "base/testing/paths.h"
#include "client/demo/cluster.h"
#include "client/demo/descriptor.h"

namespace emberd::demo {
namespace {

TEST(ChildTest, ReportsHowItEnded) {
  auto child = Child::Start({"/bin/sh", "-c", "exit 3"}, {});
  ASSERT_TRUE(child.ok());
  ASSERT_TRUE((*child)->WaitFor(absl::Seconds(10)));
  EXPECT_FALSE((*child)->Succeeded());
  EXPECT_EQ((*child)->End(), "exited with status 3");
}

TEST(ChildTest, NoSuchProgram) {
  auto child = Child::Start({"/no/such/program"}, {});
  ASSERT_TRUE(child.ok());
  ASSERT_TRUE((*child)->WaitFor(absl::Seconds(10)));
  EXPECT_EQ((*child)->End(), "exited with status 127");
}

TEST(ChildTest, StopIsFollowedByKill) {
  int pipe[2];
  ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
  const Descriptor reader(pipe[0]);
  Descriptor writer(pipe[1]);
  auto child = Child::Start({"/bin/sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"},
                            {.output = writer.get()});
  ASSERT_TRUE(child.ok());
  char byte;
  ASSERT_EQ(read(reader.get(), &byte, 1), 1);  // it ignores SIGTERM from here on
  (*child)->Stop(absl::Milliseconds(100));
  EXPECT_FALSE((*child)->Running());
  EXPECT_EQ((*child)->End(), "was killed by signal 9");
}

TEST(ChildTest, DestructorLeavesNothingBehind) {
  pid_t pid;
  {
    auto child = Child::Start({"/bin/sleep", "1000"}, {});
    ASSERT_TRUE(child.ok());
    pid = (*child)->pid();
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

// Blocked signals and descriptors are inherited over exec if nobody sees to it.
TEST(ChildTest, StartsWithCleanSignalsAndItsExtraDescriptor) {
  int pipe[2];
  ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
  const Descriptor reader(pipe[0]);
  Descriptor writer(pipe[1]);
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  auto child =
      Child::Start({"/bin/sh", "-c", "echo hello >&3; exec sleep 1000"}, {.extra = writer.get()});
  sigprocmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(child.ok());
  writer.Close();
  char text[5];
  ASSERT_EQ(read(reader.get(), text, sizeof(text)), 5);
  EXPECT_EQ(std::string(text, 5), "hello");
  (*child)->Stop(absl::Seconds(10));
  EXPECT_EQ((*child)->End(), "was killed by signal 15");
}

TEST(ClusterTest, FieldsOfTheReadyLine) {
  const std::string line = "emberd: ready coordinator=127.0.0.1:7400 http= shards=4 pids=1,2";
  EXPECT_EQ(FieldOf(line, "coordinator"), "127.0.0.1:7400");
  EXPECT_EQ(FieldOf(line, "http"), "");
  EXPECT_EQ(FieldOf(line, "pids"), "1,2");
  EXPECT_EQ(FieldOf(line, "nothing"), "");
}

TEST(ClusterTest, ServerThatIsNotThereOrDoesNotStart) {
  const auto never = [] { return false; };
  const std::string log = TempPath("cluster.log");
  EXPECT_EQ(Cluster::Start({"/no/such/emberd", 1, 1, 2, log}, never).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Cluster::Start({"/bin/false", 1, 1, 2, log}, never).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(Cluster::Start({"/usr/bin/yes", 1, 1, 2, log}, [] { return true; }).status().code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace emberd::demo
