// Memory that two processes share, as a well-behaved peer uses it. What must hold: both ends see
// the same bytes, and memory that the server may still be writing to is never used for anything
// else. For other peers, see region_server_test.cc.
//
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/regions.h"
#include "base/steady_time.h"
#include "base/testing/await.h"
#include "base/testing/region_ends.h"

namespace emberd::region_ends {
namespace shared_arena_test {

using ::testing::HasSubstr;

TEST(ArenaLink, FindsAServerThatWasRestarted) {
  auto server = StartServer();
  int asked = 0;
  ArenaLink link(
      [&](absl::Time) {
        ++asked;
        return server->Invite();
      },
      kLong);
  const auto first = link.Get();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(link.Get(), first);
  EXPECT_EQ(asked, 1);
  server = nullptr;
  server = StartServer();
  const auto second = link.Get();
  ASSERT_NE(second, nullptr);
  EXPECT_NE(second, first);
  EXPECT_EQ(asked, 2);
}

TEST(ArenaLink, AsksAServerThatRefusesLessAndLessOften) {
  for (const bool silent : {true, false}) {
    int asked = 0;
    ArenaLink link([&](absl::Time) -> absl::StatusOr<LocalInvitation> {
      ++asked;
      return silent ? absl::UnavailableError("") : absl::UnimplementedError("");
    });
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(Eventually([&] {
      EXPECT_EQ(link.Get(), nullptr);
      return asked == 4;
    }));
    // After 0, 200, 400 and 600 ms, or after 0, 200, 600 and 1400 ms.
    EXPECT_GE(absl::Now() - begin, absl::Milliseconds(silent ? 600 : 1400));
  }
}

// What this would catch: a call that waits beyond its deadline because another one has more time.
TEST(ArenaLink, NobodyWaitsAsLongAsAnotherThread) {
  absl::Notification asked, answer;
  ArenaLink link(
      [&](absl::Time) -> absl::StatusOr<LocalInvitation> {
        asked.Notify();
        EXPECT_TRUE(answer.WaitForNotificationWithTimeout(kLong));
        return absl::UnavailableError("");
      },
      kLong);
  std::thread patient([&] { EXPECT_EQ(link.Get(), nullptr); });
  asked.WaitForNotification();
  EXPECT_EQ(link.Get(SteadyNow() + absl::Milliseconds(20)), nullptr);
  answer.Notify();
  patient.join();
}

TEST(SharedArena, BothEndsSeeTheSameMemory) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(1000);
  ASSERT_NE(block, nullptr);
  std::strcpy(block->data(), "from the peer");
  const auto found = server->regions.Find(block->region(), block->offset(), 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_STREQ(found->get(), "from the peer");
  std::strcpy(found->get(), "from the server");
  EXPECT_STREQ(block->data(), "from the server");
  EXPECT_EQ(block->OffsetOf(block->data() + 64), block->offset() + 64);
  EXPECT_TRUE(block->Holds(block->data() + 10, 20));
  EXPECT_FALSE(block->Holds(block->data() - 1, 2));
  EXPECT_FALSE(block->Holds(block->data() + 4000, 4000));
}

TEST(SharedArena, BlocksDoNotOverlapAndAreUsedAgain) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  std::vector<std::shared_ptr<SharedBlock>> blocks;
  for (int i = 0; i < 50; ++i) {
    blocks.push_back(arena->Take(10'000 + 777 * i));
    ASSERT_NE(blocks.back(), nullptr);
    std::memset(blocks.back()->data(), i, 10'000 + 777 * i);
  }
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(blocks[i]->data()[0], i);
    EXPECT_EQ(blocks[i]->data()[10'000 + 777 * i - 1], i);
  }
  char* const first = blocks[0]->data();
  const auto holes = {3, 1, 2, 0};
  for (const int i : holes) blocks[i] = nullptr;  // they become one hole
  EXPECT_EQ(arena->Take(40'000)->data(), first);
  EXPECT_EQ(arena->regions(), 1);
  blocks.clear();
  EXPECT_EQ(arena->Take(64 * kMegabyte)->data(), first);
  EXPECT_EQ(server->regions.regions(), 1);
}

TEST(SharedArena, WhatTheServerMayStillUseIsNeverUsedAgain) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  auto lent = arena->Take(100);
  auto other = arena->Take(100);
  lent->Lend();
  lent->Lend();
  lent->Settle();
  const uint64_t region = lent->region();
  const auto still_at_work = server->regions.Find(region, lent->offset(), 100);
  ASSERT_TRUE(still_at_work.ok());
  lent = nullptr;
  EXPECT_NE(arena->Take(100)->region(), region);
  other = nullptr;  // the last block there
  EXPECT_TRUE(Eventually([&] { return server->regions.regions() == 1; }));
  EXPECT_EQ(server->regions.bytes(), 128 * int64_t{kMegabyte}) << "the work has not ended";
  std::memset(still_at_work->get(), 1, 100);
  auto answered = arena->Take(100);
  answered->Lend();
  answered->Settle();
  char* const data = answered->data();
  answered = nullptr;
  EXPECT_EQ(arena->Take(100)->data(), data);
}

// A block whose reader may be at work after its user has gone on: a gradient of an update that
// ended with an error, and that may yet be made. What the reader sees must not change, and the user
// must be able to write.
TEST(SharedArena, WhatIsPartedKeepsItsBytesForTheServer) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(100'000);
  const auto neighbour = arena->Take(100);
  const uint64_t region = block->region();
  std::memset(block->data(), 1, 100'000);
  block->Lend();
  const auto seen = server->regions.Find(region, block->offset(), 100'000);
  ASSERT_TRUE(seen.ok());
  EXPECT_FALSE(block->parted());
  block->Part();
  block->Part();
  EXPECT_TRUE(block->parted());
  EXPECT_EQ(block->data()[99'999], 1);
  std::memset(block->data(), 2, 100'000);
  EXPECT_EQ(seen->get()[0], 1);
  EXPECT_EQ(seen->get()[99'999], 1);
  EXPECT_EQ(block->data()[99'999], 2);
  neighbour->data()[0] = 3;
  EXPECT_EQ((*server->regions.Find(region, neighbour->offset(), 1)).get()[0], 3);
  EXPECT_NE(arena->Take(100)->region(), 0u);
}

TEST(SharedArena, LendsRegionsToOtherServers) {
  const auto giver = StartServer();
  const auto borrower = StartServer(/*max_bytes=*/0, {.max_lent_by_peer = 1});
  const auto block = ConnectTo(*giver)->Take(1000);
  ASSERT_NE(block, nullptr);
  auto lender = ConnectTo(*borrower);
  const uint64_t name = block->region();
  const std::shared_ptr<SharedRegion> region = giver->regions.Region(name);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(giver->regions.Region(name + 1), nullptr);
  EXPECT_FALSE(borrower->regions.Find(name, block->offset(), 1000).ok());
  EXPECT_TRUE(lender->LendRegion(name, *region));
  EXPECT_FALSE(lender->LendRegion(name, *region)) << "the name is taken";
  EXPECT_FALSE(lender->LendRegion(0, *region));
  const auto found = borrower->regions.Find(name, block->offset(), 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  std::strcpy(found->get(), "from the borrower");
  EXPECT_STREQ(block->data(), "from the borrower");
  EXPECT_FALSE(borrower->regions.Find(name, region->size(), 1).ok());
  EXPECT_EQ(borrower->regions.bytes(), 0);

  lender->TakeBack(name);
  EXPECT_TRUE(Eventually([&] { return !borrower->regions.Find(name, 0, 1).ok(); }));
  std::strcpy(found->get(), "still mapped");
  EXPECT_STREQ(block->data(), "still mapped");
  EXPECT_TRUE(lender->LendRegion(name, *region));
  EXPECT_EQ(borrower->regions.regions(), 1);
  lender = nullptr;  // as if it had died
  EXPECT_TRUE(Eventually([&] { return borrower->regions.regions() == 0; }));
}

TEST(SharedArena, TheBudgetHoldsForAllPeersTogether) {
  const auto server = StartServer(100 * kMegabyte);
  const auto one = ConnectTo(*server);
  const auto two = ConnectTo(*server);
  const auto block = one->Take(100);
  ASSERT_NE(block, nullptr);  // takes a region of 64 MiB
  const auto small = two->Take(10 * kMegabyte);
  ASSERT_NE(small, nullptr) << "less than a usual region is left, but enough";
  EXPECT_EQ(two->Take(30 * kMegabyte), nullptr);
  EXPECT_EQ(server->regions.bytes(), 74 * int64_t{kMegabyte});
  EXPECT_TRUE(two->alive());
}

TEST(SharedArena, RegionsThatAreTooSmallMakeRoomForLargerOnes) {
  const auto server = StartServer(100 * kMegabyte);
  const auto arena = ConnectTo(*server);
  ASSERT_NE(arena->Take(60 * kMegabyte), nullptr);
  const auto large = arena->Take(90 * kMegabyte);
  ASSERT_NE(large, nullptr);
  large->data()[90 * kMegabyte - 1] = 1;
  EXPECT_EQ(arena->regions(), 1);
  EXPECT_EQ(arena->Take(20 * kMegabyte), nullptr) << "the only region is in use";
}

TEST(SharedArena, ATicketIsGoodOnceAndOnlyForItsServer) {
  const auto server = StartServer();
  const LocalInvitation invitation = server->Invite();
  ASSERT_TRUE(
      SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong)
          .ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, invitation.ticket).ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, std::string(32, 'x')).ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, "short").ok());
  EXPECT_FALSE(SharedArena::Connect("", invitation.ticket).ok());
  EXPECT_FALSE(SharedArena::Connect(std::string(200, 'x'), invitation.ticket).ok());
  EXPECT_THAT(SharedArena::Connect("emberd-test/nobody", std::string(32, 'x')).status().message(),
              HasSubstr("nobody listens there on this machine"));
  const auto late = StartServer(1, {}, {.ticket_life = absl::Nanoseconds(1)});
  const LocalInvitation expired = late->Invite();
  EXPECT_FALSE(SharedArena::Connect(expired.socket, expired.ticket).ok());
}

// Whoever has taken the name of a dead server would be given memory, and lent that of others.
TEST(SharedArena, DoesNotTakeSomebodyElseForItsServer) {
  LocalInvitation invitation = StartServer()->Invite();  // it is gone
  const AbstractAddress address(invitation.socket);
  const FileDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(listener.get(), address.get(), address.length), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  std::thread impostor([&] {
    const FileDescriptor peer(accept(listener.get(), nullptr, nullptr));
    LocalHello hello;  // it gives back what it was shown
    recv(peer.get(), &hello, sizeof(hello), 0);
    send(peer.get(), &hello, sizeof(hello), MSG_NOSIGNAL);
  });
  EXPECT_THAT(
      SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong)
          .status()
          .message(),
      HasSubstr("it does not know the ticket"));
  impostor.join();
}

// The failure that this would catch: an arena is given up, and another one opened beside it,
// because it was looked at while somebody else was being answered.
TEST(SharedArena, IsAliveWhileItIsAnswered) {
  const auto server = StartServer(kMegabyte);
  const auto arena = ConnectTo(*server);
  std::atomic<bool> done = false;
  std::thread asks([&] {
    for (int i = 0; i < 3000; ++i) EXPECT_EQ(arena->Take(2 * kMegabyte), nullptr);
    done.store(true);
  });
  int dead = 0;
  while (!done.load()) dead += arena->alive() ? 0 : 1;
  asks.join();
  EXPECT_EQ(dead, 0);
}

// Lets one peer in, and answers nothing, as a process that was stopped.
struct SilentHost final : LocalHost {
  struct Guest final : LocalGuest {
    explicit Guest(FileDescriptor connection) : connection(std::move(connection)) {}
    int socket() const override { return connection.get(); }
    short events() const override { return 0; }
    void OnEvent() override {}
    bool over() const override { return false; }
    const FileDescriptor connection;
  };
  std::unique_ptr<LocalGuest> Enter(FileDescriptor connection, LocalPeer, LocalServer*) override {
    socket = connection.get();
    return std::make_unique<Guest>(std::move(connection));
  }
  bool PeerIsGone() const {
    pollfd watched = {socket.load(), POLLRDHUP, 0};
    return poll(&watched, 1, 0) == 1;
  }
  std::atomic<int> socket = -1;
};

// Requests on their way may name what it was lent.
TEST(SharedArena, AsksASilentServerNothingMoreAndStaysConnected) {
  SilentHost host;
  const auto server =
      *LocalServer::Start({.ticket_life = kLong, .stranger_patience = kLong}, &host, nullptr);
  const LocalInvitation invitation = server->Invite({});
  auto arena =
      *SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
  ASSERT_TRUE(Eventually([&] { return host.socket >= 0; }));
  EXPECT_TRUE(arena->alive());
  EXPECT_EQ(arena->Take(100, SteadyNow()), nullptr);
  EXPECT_TRUE(arena->alive()) << "nobody has waited for it";
  EXPECT_EQ(arena->Take(100, SteadyNow() + absl::Milliseconds(20)), nullptr);
  EXPECT_FALSE(arena->alive()) << "others connect anew";
  EXPECT_FALSE(host.PeerIsGone());
  arena = nullptr;
  EXPECT_TRUE(Eventually([&] { return host.PeerIsGone(); }));
}

// What this would catch: a step that is not sent in its half second, and a block that is not given
// back, because another thread waits for a server that is silent.
TEST(SharedArena, NobodyWaitsAsLongAsAnotherThread) {
  SilentHost host;
  auto server =
      *LocalServer::Start({.ticket_life = kLong, .stranger_patience = kLong}, &host, nullptr);
  const LocalInvitation invitation = server->Invite({});
  const auto arena =
      *SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
  std::thread patient([&] { EXPECT_EQ(arena->Take(100), nullptr); });
  EXPECT_TRUE(Eventually([&] {
    pollfd request = {host.socket.load(), POLLIN, 0};
    return poll(&request, 1, 0) == 1;
  }));
  EXPECT_EQ(arena->Take(100, SteadyNow() + absl::Milliseconds(20)), nullptr);
  const auto region = *SharedRegion::Create("lent", kMegabyte);
  EXPECT_FALSE(arena->LendRegion(7, *region, SteadyNow() + absl::Milliseconds(20)));
  EXPECT_TRUE(arena->alive()) << "the other thread has given up";
  server = nullptr;
  patient.join();
}

// Lets one peer in, and calls `answer` with its socket and each request.
struct AnsweringHost final : LocalHost {
  using Answer = std::function<void(int socket, const regions::Request& request)>;
  struct Guest final : LocalGuest {
    Guest(FileDescriptor connection, const Answer& answer)
        : connection(std::move(connection)), answer(answer) {}
    int socket() const override { return connection.get(); }
    short events() const override { return POLLIN; }
    void OnEvent() override {
      FileDescriptor none;
      const auto request = regions::ReceiveRequest(connection.get(), &none);
      gone = !request.has_value();
      if (!gone) answer(connection.get(), *request);
    }
    bool over() const override { return gone; }
    const FileDescriptor connection;
    const Answer& answer;
    bool gone = false;
  };
  explicit AnsweringHost(Answer answer) : answer(std::move(answer)) {}
  std::unique_ptr<LocalGuest> Enter(FileDescriptor connection, LocalPeer, LocalServer*) override {
    return std::make_unique<Guest>(std::move(connection), answer);
  }
  const Answer answer;
};

void GiveRegion(int socket, uint64_t name, uint64_t bytes, int file) {
  regions::Answer answer;
  answer.region = name;
  answer.bytes = bytes;
  EXPECT_TRUE(regions::SendPacket(socket, answer, 0, file));
}

// Whether a thread of this process sleeps, or is no more.
bool Sleeps(pid_t thread) {
  std::ifstream file(absl::StrCat("/proc/self/task/", thread, "/stat"));
  std::string line;
  return !std::getline(file, line) || absl::StrContains(line, ") S ");
}

// What this would catch: a step that waits for a server that is silent though memory is free again.
TEST(SharedArena, ABlockThatIsGivenBackWakesWhoeverWaits) {
  std::atomic<int> asked = 0;  // for regions: the first is given, and nothing more is answered
  AnsweringHost host([&](int socket, const regions::Request& request) {
    if (request.kind != regions::kTake || asked++ > 0) return;
    const auto region = *SharedRegion::Create("one", request.bytes);
    GiveRegion(socket, 1, request.bytes, region->descriptor());
  });
  auto server =
      *LocalServer::Start({.ticket_life = kLong, .stranger_patience = kLong}, &host, nullptr);
  const LocalInvitation invitation = server->Invite({});
  const auto arena =
      *SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
  std::shared_ptr<SharedBlock> block = arena->Take(64 * kMegabyte);  // the whole region
  ASSERT_NE(block, nullptr);
  std::thread patient([&] { EXPECT_EQ(arena->Take(100 * kMegabyte), nullptr); });
  EXPECT_TRUE(Eventually([&] { return asked == 2; }));
  EXPECT_TRUE(Eventually([&] {
    std::atomic<pid_t> waiter = 0;
    std::shared_ptr<SharedBlock> taken;
    std::thread waits([&] {
      waiter = gettid();
      // It would look again by itself at the end of the longest wait.
      taken = arena->Take(64 * kMegabyte, SteadyNow() + kLongestWait * 0.9);
    });
    EXPECT_TRUE(Eventually([&] { return waiter != 0 && Sleeps(waiter); }));
    block = nullptr;
    waits.join();
    block = taken != nullptr ? taken : arena->Take(64 * kMegabyte);
    return taken != nullptr;
  }));
  server = nullptr;
  patient.join();
}

// Files that cannot be mapped: as where a process may have no more addresses (`ulimit -v`), but
// without one.
TEST(SharedArena, GivesBackWhatItCannotMap) {
  std::atomic<int> kept = 0;  // regions
  AnsweringHost host([&](int socket, const regions::Request& request) {
    if (request.kind == regions::kDrop) --kept;
    if (request.kind != regions::kTake) return;
    const FileDescriptor file(memfd_create("not-sealed", MFD_CLOEXEC));
    GiveRegion(socket, ++kept, request.bytes, file.get());
  });
  const auto server =
      *LocalServer::Start({.ticket_life = kLong, .stranger_patience = kLong}, &host, nullptr);
  const LocalInvitation invitation = server->Invite({});
  const auto arena =
      *SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
  EXPECT_EQ(arena->Take(100), nullptr);
  EXPECT_TRUE(Eventually([&] { return kept == 0; }));
  EXPECT_TRUE(arena->alive());
}

TEST(SharedArena, OutlivesItsServerAndSaysSo) {
  auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(100);
  EXPECT_TRUE(arena->alive());
  server = nullptr;
  EXPECT_FALSE(arena->alive());
  std::memset(block->data(), 7, 100);
  EXPECT_EQ(arena->Take(128 * kMegabyte), nullptr);
  EXPECT_EQ(block->data()[99], 7);
}

}  // namespace shared_arena_test
}  // namespace emberd::region_ends
