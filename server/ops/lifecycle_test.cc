// A process that ignores SIGTERM is killed by its manager in the middle of a write; one that exits
// on the first signal loses accepted requests. These tests run real children and look at how they
// end. The parent forks before it has any thread of its own, and a child ends by _exit.
#include "server/ops/lifecycle.h"

#include <functional>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "server/ops/logging.h"

namespace emberd::ops {
namespace lifecycle_test {

struct Child {
  pid_t pid;
  int pipe;  // what the child writes

  char ReadByte() const {
    char byte = 0;
    return read(pipe, &byte, 1) == 1 ? byte : '\0';
  }
  int WaitStatus() const {
    int status = 0;
    waitpid(pid, &status, 0);
    close(pipe);
    return status;
  }
};

Child Fork(const std::function<void(int pipe)>& body) {
  int fds[2];
  if (pipe(fds) != 0) abort();
  const pid_t pid = fork();
  if (pid == 0) {
    close(fds[0]);
    alarm(120);  // never outlives a failed test
    body(fds[1]);
    _exit(0);
  }
  close(fds[1]);
  return {pid, fds[0]};
}

void Say(int pipe, char byte) {
  if (write(pipe, &byte, 1) != 1) _exit(9);
}

TEST(ShutdownSignalTest, TheFirstSignalLetsTheProcessFinish) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const Child child = Fork([](int pipe) {
      auto shutdown = ShutdownSignal::Create();
      if (!shutdown.ok()) _exit(8);
      if ((*shutdown)->WaitFor(absl::Milliseconds(1))) _exit(7);
      Say(pipe, 'r');
      (*shutdown)->Wait();
      absl::SleepFor(absl::Milliseconds(50));  // draining
      Say(pipe, 'd');
      shutdown->reset();
      _exit(42);
    });
    ASSERT_EQ(child.ReadByte(), 'r');
    kill(child.pid, signal);
    EXPECT_EQ(child.ReadByte(), 'd');
    const int status = child.WaitStatus();
    EXPECT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), 42);
  }
}

TEST(ShutdownSignalTest, TheSecondSignalEndsItAtOnce) {
  const Child child = Fork([](int pipe) {
    auto shutdown = ShutdownSignal::Create();
    if (!shutdown.ok()) _exit(8);
    Say(pipe, 'r');
    (*shutdown)->Wait();
    Say(pipe, 'd');
    absl::SleepFor(absl::Seconds(25));
    _exit(0);
  });
  ASSERT_EQ(child.ReadByte(), 'r');
  kill(child.pid, SIGTERM);
  ASSERT_EQ(child.ReadByte(), 'd');
  kill(child.pid, SIGTERM);
  const int status = child.WaitStatus();
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

// Would catch: a cluster that saves nothing when its terminal is closed, for the shell sends
// SIGHUP, and the kernel sends it again.
TEST(ShutdownSignalTest, HangupsLetTheProcessFinish) {
  const Child child = Fork([](int) {
    signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
    auto shutdown = ShutdownSignal::Create();
    if (!shutdown.ok()) _exit(8);
    kill(getpid(), SIGHUP);
    (*shutdown)->Wait();
    kill(getpid(), SIGHUP);
    shutdown->reset();
    _exit(42);
  });
  const int status = child.WaitStatus();
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

// As under nohup: what comes after it is the first signal.
TEST(ShutdownSignalTest, AHangupThatIsIgnoredIsNone) {
  const Child child = Fork([](int) {
    signal(SIGHUP, SIG_IGN);
    auto shutdown = ShutdownSignal::Create();
    if (!shutdown.ok()) _exit(8);
    kill(getpid(), SIGHUP);
    kill(getpid(), SIGTERM);
    (*shutdown)->Wait();
    shutdown->reset();
    _exit(42);
  });
  const int status = child.WaitStatus();
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

TEST(ExitDeadlineTest, EndsAProcessThatHangsAndOnlyThat) {
  const Child hanging = Fork([](int) {
    ExitDeadline deadline(absl::Milliseconds(50));
    absl::SleepFor(absl::Seconds(25));
    _exit(0);
  });
  EXPECT_EQ(WEXITSTATUS(hanging.WaitStatus()), 1);
  const Child orderly = Fork([](int) {
    { ExitDeadline deadline(absl::Seconds(20)); }
    _exit(3);
  });
  EXPECT_EQ(WEXITSTATUS(orderly.WaitStatus()), 3);
}

// grpc.health.v1.Health/Check of `service`, without its .proto: the request is field 1 (the name),
// the answer is field 1 (1 serving, 2 not serving).
std::string Health(int port, const std::string& service) {
  auto channel =
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  std::string encoded;
  if (!service.empty()) encoded = std::string("\x0a") + static_cast<char>(service.size()) + service;
  grpc::Slice slice(encoded);
  auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                    grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) return "error " + std::to_string(status.error_code());
  grpc::Slice flat;
  if (!answer.DumpToSingleSlice(&flat).ok() || flat.size() != 2) return "?";
  return flat.begin()[1] == 1 ? "SERVING" : flat.begin()[1] == 2 ? "NOT_SERVING" : "UNKNOWN";
}

TEST(StandardServicesTest, HealthFollowsSetServing) {
  grpc::ServerBuilder builder;
  EnableStandardServices(&builder);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  auto server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const std::string service = "emberd.v1.EmbeddingService";
  SetServing(server.get(), {service}, true);
  EXPECT_EQ(Health(port, ""), "SERVING");
  EXPECT_EQ(Health(port, service), "SERVING");
  EXPECT_EQ(Health(port, "no.such.Service"), "error 5");
  SetServing(server.get(), {service}, false);
  EXPECT_EQ(Health(port, ""), "NOT_SERVING");
  EXPECT_EQ(Health(port, service), "NOT_SERVING");
  server->Shutdown();
}

}  // namespace lifecycle_test
}  // namespace emberd::ops
