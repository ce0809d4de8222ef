// A lane joins two processes that do not trust one another, and either may die or stop at any
// moment. What must hold: nobody gets in without a ticket; whatever a client sends, the server goes
// on serving others; no call outlasts its deadline or its cancellation; and who is gone leaves
// neither a descriptor nor a thread behind.
//
// Covers: lanes.cc, local_server.cc
#include <atomic>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/lanes.h"
#include "base/steady_time.h"
#include "base/testing/await.h"
#include "base/testing/lane_ends.h"

namespace emberd {
namespace lane_test {

using lane_ends::Ask;
using lane_ends::Echo;
using lane_ends::kLong;
using lane_ends::Late;
using lane_ends::PoolTo;
using lane_ends::SendTo;
using lane_ends::Serve;

int OpenDescriptors() {
  int count = 0;
  for (int i = 0; i < 4096; ++i) count += fcntl(i, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

int64_t ThreadsNow() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// A client that says what it likes.
class RawClient {
 public:
  explicit RawClient(const LocalInvitation& invitation)
      : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const AbstractAddress address(invitation.socket);
    const timeval patience = {120, 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    (void)!connect(socket_.get(), address.get(), address.length);
  }
  bool Hello(const LocalInvitation& invitation, LocalKind kind = LocalKind::kCalls,
             uint32_t version = LocalHello::kVersion) {
    LocalHello hello;
    hello.version = version;
    hello.kind = kind;
    std::memcpy(hello.half_ticket, invitation.ticket.data(), sizeof(hello.half_ticket));
    Send(std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)));
    return Receive() == sizeof(hello);
  }
  void Send(const std::string& packet) {
    send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL);
  }
  // Bytes of the next packet; 0 or less: the server has closed the connection.
  ssize_t Receive() {
    packet.resize(lanes::kMaxPacketBytes);
    const ssize_t size = recv(socket_.get(), packet.data(), packet.size(), 0);
    packet.resize(std::max<ssize_t>(size, 0));
    return size;
  }
  std::string packet;

 private:
  FileDescriptor socket_;
};

TEST(Lane, CarriesACallAndItsAnswer) {
  const auto server = Serve(Echo);
  const auto pool = PoolTo(*server);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(Ask(*pool, absl::StrCat("body", i)),
              absl::StrCat("7 Bearer me trace body", i, " somewhere"));
  }
  EXPECT_EQ(pool->lanes(), 1);
  EXPECT_EQ(server->lanes.lanes(), 1);
}

TEST(Lane, CarriesErrors) {
  const auto server = Serve(
      [](LaneCall*) -> LaneAnswer { return {.status = absl::NotFoundError("no such thing")}; });
  const auto pool = PoolTo(*server);
  const auto answer = SendTo(*pool)->Receive(Late());
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, absl::NotFoundError("no such thing"));
}

TEST(Lane, SaysThatAnAnswerDoesNotFit) {
  std::atomic<size_t> size = lanes::kMaxPacketBytes;
  const auto server =
      Serve([&](LaneCall*) -> LaneAnswer { return {.body = std::string(size, 'x')}; });
  const auto pool = PoolTo(*server);
  EXPECT_FALSE(SendTo(*pool)->Receive(Late()).has_value());
  EXPECT_EQ(pool->lanes(), 1);
  size = lanes::kMaxPacketBytes - 256;
  EXPECT_EQ(Ask(*pool).size(), size);  // the lane is as good as before
  EXPECT_EQ(server->lanes.lanes(), 1);
}

TEST(Lane, TakesNoRequestThatDoesNotFit) {
  const auto server = Serve(Echo);
  const auto pool = PoolTo(*server);
  ASSERT_NE(Ask(*pool), "");
  EXPECT_EQ(pool->Send({.body = std::string(lanes::kMaxPacketBytes, 'x')}), nullptr);
  EXPECT_NE(Ask(*pool, std::string(lanes::kMaxPacketBytes / 2, 'x')), "");
}

TEST(Lane, ManyCallersHaveALaneEach) {
  std::latch together(5);
  const auto server = Serve([&](LaneCall* call) {
    together.arrive_and_wait();
    return Echo(call);
  });
  const auto pool = PoolTo(*server);
  std::vector<std::unique_ptr<LaneClientCall>> calls;
  for (int i = 0; i < 5; ++i) calls.push_back(SendTo(*pool));
  for (const auto& call : calls) EXPECT_TRUE(call->Receive(Late()).has_value());
}

// Would catch: a lane for whoever knows the name of the socket, which everybody can look up.
TEST(Lane, LetsNobodyInWithoutATicket) {
  const auto server = Serve(Echo);
  const LocalInvitation good = server->Invite({});
  LocalInvitation bad = good;
  bad.ticket[3] ^= 1;
  EXPECT_FALSE(RawClient(bad).Hello(bad));
  EXPECT_FALSE(RawClient(good).Hello(good, LocalKind::kCalls, LocalHello::kVersion + 1));
  EXPECT_FALSE(RawClient(good).Hello(good, LocalKind::kMemory)) << "there is none here";
  EXPECT_FALSE(RawClient(good).Hello(good, static_cast<LocalKind>(77)));
  const LocalInvitation other = server->Invite({});
  RawClient client(other);
  EXPECT_TRUE(client.Hello(other));
  EXPECT_FALSE(RawClient(other).Hello(other)) << "a ticket is good once";
  EXPECT_TRUE(Eventually([&] { return server->lanes.lanes() == 1; }));
  RawClient stranger(other);
  std::string head;  // a request is no invitation either
  ASSERT_TRUE(lanes::EncodeHead(lanes::Request{}, &head));
  stranger.Send(head);
  EXPECT_LE(stranger.Receive(), 0);
}

TEST(Lane, TicketsExpire) {
  const auto server = Serve(Echo, 256, {.ticket_life = absl::Milliseconds(1)});
  const LocalInvitation late = server->Invite();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(RawClient(late).Hello(late));
}

// Would catch: a client that sends its token to whoever has taken the name of a dead server.
TEST(Lane, ClientsWantTheirServer) {
  const auto server = Serve(Echo);
  LanePool pool(
      8,
      [&](absl::Time) {
        LocalInvitation invitation = server->Invite({});
        invitation.ticket.back() ^= 1;
        return invitation;
      },
      absl::ZeroDuration(), kLong);
  EXPECT_EQ(SendTo(pool), nullptr);
  EXPECT_EQ(pool.lanes(), 0);
}

// Would catch: a process that asks for random numbers for ever where it may not have them.
TEST(Lane, InvitesNobodyWithoutRandomNumbers) {
  const auto server = Serve(Echo);
  bool filtered = false;
  LocalInvitation invitation;
  absl::Status given, started;
  std::thread([&] {  // the filter is this thread's
    sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_getrandom, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program = {.len = std::size(steps), .filter = steps};
    filtered = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
               prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    if (!filtered) return;
    given = RandomBytes(8).status();
    started = LocalServer::Start({}, nullptr, nullptr).status();
    invitation = server->Invite({});
  })
      .join();
  if (!filtered) GTEST_SKIP() << "the system takes no filter of its calls";
  EXPECT_EQ(given, absl::UnavailableError("no random numbers: Function not implemented"));
  EXPECT_EQ(started, given);
  EXPECT_EQ(invitation.socket + invitation.ticket, "");
}

TEST(Lane, OtherUsersStayOutside) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be somebody else";
  for (const bool any : {false, true}) {
    const auto server =
        Serve(Echo, 256, {.any_user = any, .ticket_life = kLong, .stranger_patience = kLong});
    const LocalInvitation invitation = server->Invite();
    const pid_t other = fork();
    if (other == 0) {
      if (setuid(12345) != 0) _exit(3);
      _exit(RawClient(invitation).Hello(invitation) ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(other, &status, 0), other);
    EXPECT_EQ(WEXITSTATUS(status), any ? 0 : 1);
  }
}

TEST(Lane, NonsenseEndsItsLaneAndNoOther) {
  const auto server = Serve(Echo);
  const auto pool = PoolTo(*server);
  ASSERT_NE(Ask(*pool), "");
  std::string good;
  ASSERT_TRUE(lanes::EncodeHead(lanes::Request{.authorization = "a", .trace = "b"}, &good));
  std::vector<std::string> packets = {"x", good + "more", good.substr(0, good.size() - 1),
                                      std::string(good.size(), '\xff'),
                                      std::string(lanes::kMaxPacketBytes + 1, '\0')};
  for (const std::string& packet : packets) {
    const LocalInvitation invitation = server->Invite({});
    RawClient client(invitation);
    ASSERT_TRUE(client.Hello(invitation));
    client.Send(packet);
    EXPECT_EQ(client.Receive(), 0) << packet.size() << ": it is closed";
  }
  EXPECT_TRUE(Eventually([&] { return server->lanes.lanes() == 1; }));
  EXPECT_NE(Ask(*pool), "");
}

TEST(Lane, ClientsTakeNoAnswerToSomethingElse) {
  const auto listener = FileDescriptor(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
  const LocalInvitation invitation = {absl::StrCat("lane-test/false-", getpid()),
                                      std::string(kLocalTicketBytes, 't')};
  const AbstractAddress address(invitation.socket);
  ASSERT_EQ(bind(listener.get(), address.get(), address.length), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  std::thread server([&] {
    for (int i = 0; i < 2; ++i) {
      const FileDescriptor lane(accept(listener.get(), nullptr, nullptr));
      std::string packet(lanes::kMaxPacketBytes, '\0');
      LocalHello hello;
      std::memset(hello.half_ticket, 't', sizeof(hello.half_ticket));
      recv(lane.get(), packet.data(), packet.size(), 0);
      send(lane.get(), &hello, sizeof(hello), 0);
      recv(lane.get(), packet.data(), packet.size(), 0);
      std::string head = "nonsense";
      if (i == 0) lanes::EncodeHead(lanes::Answer{.number = 99}, &head);
      lanes::SendPacket(lane.get(), head, "");
      recv(lane.get(), packet.data(), packet.size(), 0);
    }
  });
  LanePool pool(
      1, [&](absl::Time) { return invitation; }, absl::ZeroDuration(), kLong);
  for (int i = 0; i < 2; ++i) {
    auto call = SendTo(pool);
    ASSERT_NE(call, nullptr);
    EXPECT_FALSE(call->Receive(Late()).has_value());
    call = nullptr;
    EXPECT_EQ(pool.lanes(), 0);
  }
  server.join();
}

TEST(Lane, ThereAreNoMoreThanAllowed) {
  const auto server = Serve(Echo, /*max_lanes=*/2);
  std::vector<std::unique_ptr<LanePool>> pools;
  for (int i = 0; i < 3; ++i) {
    pools.push_back(PoolTo(*server));
    EXPECT_EQ(Ask(*pools.back()) != "", i < 2);
  }
  pools.erase(pools.begin());
  EXPECT_TRUE(Eventually([&] { return server->lanes.lanes() == 1; }));
  EXPECT_NE(Ask(*PoolTo(*server)), "");
}

TEST(Lane, ClientsOpenNoMoreThanTheirOwn) {
  absl::Notification end;
  const auto server = Serve([&](LaneCall* call) {
    end.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server, /*max_lanes=*/1);
  const auto first = SendTo(*pool);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(SendTo(*pool), nullptr);
  end.Notify();
  EXPECT_TRUE(first->Receive(Late()).has_value());
}

TEST(Lane, ServersHearOfACancellationOnce) {
  absl::Notification begun, end;
  std::atomic<int> heard = 0;
  const auto server = Serve([&](LaneCall* call) {
    call->OnCancel([&] { ++heard; });
    begun.Notify();
    end.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server);
  auto call = SendTo(*pool);
  begun.WaitForNotification();
  call = nullptr;
  EXPECT_TRUE(Eventually([&] { return heard == 1; }));
  std::thread drain([&] { server->lanes.Drain(absl::ZeroDuration()); });
  absl::SleepFor(absl::Milliseconds(20));
  end.Notify();
  drain.join();
  EXPECT_EQ(heard, 1);
}

// Would catch: whoever dies in the middle of a call leaves a thread or a descriptor behind.
TEST(Lane, AClientThatIsKilledLeavesNothingBehind) {
  std::atomic<int> begun = 0, cancelled = 0;
  const auto server = Serve([&](LaneCall* call) {
    ++begun;
    absl::Notification gone;
    call->OnCancel([&] { gone.Notify(); });
    gone.WaitForNotification();
    ++cancelled;
    return Echo(call);
  });
  const int descriptors = OpenDescriptors();
  const int64_t threads = ThreadsNow();
  for (int round = 1; round <= 3; ++round) {
    const LocalInvitation invitation = server->Invite({});
    const pid_t client = fork();
    if (client == 0) {
      RawClient raw(invitation);
      if (!raw.Hello(invitation)) _exit(1);
      std::string head;
      lanes::EncodeHead(lanes::Request{}, &head);
      raw.Send(head);
      raw.Receive();
      _exit(0);
    }
    ASSERT_TRUE(Eventually([&] { return begun == round; }));
    kill(client, SIGKILL);
    ASSERT_EQ(waitpid(client, nullptr, 0), client);
    EXPECT_TRUE(Eventually([&] { return cancelled == round; }));
    EXPECT_TRUE(Eventually([&] { return server->lanes.lanes() == 0; }));
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors; }));
  // One that was joined before may have been counted, for it ends a moment later.
  EXPECT_TRUE(Eventually([&] { return ThreadsNow() <= threads; }));
}

TEST(Lane, AServerThatIsGoneIsFoundAgain) {
  auto server = Serve(Echo);
  LanePool pool(
      8, [&](absl::Time) { return server->Invite({}); }, absl::ZeroDuration(), kLong);
  auto first = SendTo(pool), second = SendTo(pool);
  for (auto* const call : {&first, &second}) {
    ASSERT_TRUE((*call)->Receive(Late()).has_value());
    *call = nullptr;
  }
  EXPECT_EQ(pool.lanes(), 2);
  server = Serve(Echo);
  EXPECT_EQ(pool.Send({.body = "x"}), nullptr) << "what is broken is not used";
  EXPECT_EQ(pool.lanes(), 0);
  EXPECT_NE(Ask(pool), "") << "and the next server is asked at once";
}

TEST(Lane, AServerThatSaysNoIsAskedLessAndLess) {
  int asked = 0;
  LanePool pool(8, [&](absl::Time) -> absl::StatusOr<LocalInvitation> {
    ++asked;
    return absl::UnimplementedError("no lanes here");
  });
  const absl::Time begin = SteadyNow();
  for (int i = 0; i < 1000; ++i) pool.Grow(Late());
  // After 0, 200, 600, 1400 ms and so on, should this take so long.
  int most = 1;
  absl::Duration pause = absl::Milliseconds(200);
  for (absl::Duration left = SteadyNow() - begin; left >= pause; left -= pause, pause *= 2) ++most;
  EXPECT_GE(asked, 1);
  EXPECT_LE(asked, most);
}

// A call in progress gets its answer, one that does not end in time is cancelled, and nobody comes
// in any more.
TEST(Lane, DrainsBeforeItGoes) {
  absl::Notification begun, end;
  std::atomic<bool> cancelled = false;
  const auto server = Serve([&](LaneCall* call) {
    call->OnCancel([&] { cancelled = true; });
    begun.Notify();
    end.WaitForNotification();
    EXPECT_FALSE(cancelled);
    return Echo(call);
  });
  const auto pool = PoolTo(*server);
  const auto call = SendTo(*pool);
  begun.WaitForNotification();
  const LocalInvitation late = server->Invite({});
  std::thread drain([&] { server->lanes.Drain(kLong); });
  absl::SleepFor(absl::Milliseconds(20));
  end.Notify();
  EXPECT_TRUE(call->Receive(Late()).has_value());
  drain.join();
  EXPECT_EQ(server->lanes.lanes(), 0);
  EXPECT_FALSE(RawClient(late).Hello(late));
}

TEST(Lane, CancelsWhatDoesNotEnd) {
  absl::Notification begun;
  auto server = Serve([&](LaneCall* call) {
    absl::Notification cancelled;
    call->OnCancel([&] { cancelled.Notify(); });
    begun.Notify();
    cancelled.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server);
  const auto call = SendTo(*pool);
  begun.WaitForNotification();
  const int64_t threads = ThreadsNow();
  server->lanes.Drain(absl::Milliseconds(10));
  EXPECT_TRUE(Eventually([&] { return ThreadsNow() < threads; }));
}

}  // namespace lane_test
}  // namespace emberd
