// Peers that do not keep to the rules, and peers that die: they get no memory but their own, and
// leave no region, mapping or descriptor behind. For what well-behaved ones do, see
// shared_arena_test.cc.
//
// Covers: local_server.cc
#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "base/regions.h"
#include "base/testing/await.h"
#include "base/testing/region_ends.h"

namespace emberd::region_ends {
namespace region_server_test {

using ::testing::HasSubstr;

int OpenFiles() {
  int count = 0;
  for (int i = 0; i < 4096; ++i) count += fcntl(i, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

// Maps of shared memory of this test in this process.
int Mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    count += line.find("memfd:emberd-test") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(RegionServer, FindsNothingOutsideOfRegions) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(100);
  const uint64_t region = block->region();
  const uint64_t size = 64 * kMegabyte;
  EXPECT_TRUE(server->regions.Find(region, 0, size).ok());
  EXPECT_TRUE(server->regions.Find(region, size, 0).ok());
  const std::pair<uint64_t, uint64_t> outside[] = {{1, size},         {size, 1},
                                                   {0, size + 1},     {~uint64_t{0}, 1},
                                                   {1, ~uint64_t{0}}, {~uint64_t{0}, ~uint64_t{0}}};
  for (const auto& [offset, bytes] : outside) {
    EXPECT_EQ(server->regions.Find(region, offset, bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(server->regions.Find(region + 1, 0, 1).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(server->regions.Find(0, 0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

// Sends packets of a peer's own making.
class RawPeer {
 public:
  explicit RawPeer(Server& server)
      : invitation_(server.Invite()), socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const AbstractAddress address(invitation_.socket);
    EXPECT_EQ(connect(socket_.get(), address.get(), address.length), 0);
  }
  // Whether it is let in.
  bool Greet() {
    LocalHello hello;
    std::memcpy(hello.half_ticket, invitation_.ticket.data(), sizeof(hello.half_ticket));
    send(socket_.get(), &hello, sizeof(hello), 0);
    return recv(socket_.get(), &hello, sizeof(hello), 0) == sizeof(hello);
  }
  void Say(regions::Kind kind, uint64_t region, uint64_t bytes) {
    regions::Request request;
    request.kind = kind;
    request.region = region;
    request.bytes = bytes;
    regions::SendPacket(socket_.get(), request, 0);
  }
  std::optional<regions::Answer> Hear() { return regions::ReceiveAnswer(socket_.get(), &file); }
  int get() const { return socket_.get(); }

  FileDescriptor file;

 private:
  const LocalInvitation invitation_;
  const FileDescriptor socket_;
};

TEST(RegionServer, SendsPeersAwayThatDoNotKeepToTheRules) {
  const auto server = StartServer();
  RawPeer hasty(*server);
  hasty.Say(regions::kTake, 0, 4096);  // without a ticket
  EXPECT_FALSE(hasty.Hear().has_value());
  RawPeer babbler(*server);
  ASSERT_EQ(send(babbler.get(), "abc", 3, 0), 3);
  EXPECT_FALSE(babbler.Hear().has_value());
  RawPeer odd(*server);
  EXPECT_TRUE(odd.Greet());
  odd.Say(static_cast<regions::Kind>(77), 0, 0);
  EXPECT_FALSE(odd.Hear().has_value());
  EXPECT_TRUE(Eventually([&] { return server->regions.peers() == 0; }));
}

TEST(RegionServer, GivesNoMoreThanItHasAndTakesBackOnlyTheOwners) {
  const auto server = StartServer(kMegabyte);
  RawPeer greedy(*server);
  ASSERT_TRUE(greedy.Greet());
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{kMegabyte + 1}, ~uint64_t{0}}) {
    greedy.Say(regions::kTake, 0, bytes);
    EXPECT_EQ(greedy.Hear()->region, 0u) << bytes;
  }
  greedy.Say(regions::kTake, 0, 8192);
  const uint64_t region = greedy.Hear()->region;
  ASSERT_NE(region, 0u);
  // Nobody can change the size of what is mapped here.
  EXPECT_NE(ftruncate(greedy.file.get(), 0), 0);
  EXPECT_NE(ftruncate(greedy.file.get(), 1 << 20), 0);
  RawPeer thief(*server);
  ASSERT_TRUE(thief.Greet());
  thief.Say(regions::kDrop, region, 0);
  thief.Say(regions::kTake, 0, 1);
  ASSERT_TRUE(thief.Hear().has_value());
  EXPECT_TRUE(server->regions.Find(region, 0, 8192).ok());
  greedy.Say(regions::kDrop, region, 0);
  EXPECT_TRUE(Eventually([&] { return !server->regions.Find(region, 0, 1).ok(); }));
}

// The failure that this would catch: the kernel has put a second file beside the first, where
// nobody looks, and it stays open for ever. No ticket is needed for that.
TEST(RegionServer, ClosesWhatComesBesideTheOneFile) {
  const auto server = StartServer();
  const FileDescriptor file(memfd_create("emberd-test", MFD_CLOEXEC));
  const int files = OpenFiles();
  for (const int count : {1, 2, 3, 200}) {
    RawPeer peer(*server);
    regions::Request request;
    iovec bytes = {&request, sizeof(request)};
    std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
    msghdr message = {};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    const std::vector<int> sent(count, file.get());
    std::memcpy(CMSG_DATA(header), sent.data(), count * sizeof(int));
    ASSERT_EQ(sendmsg(peer.get(), &message, 0), static_cast<ssize_t>(sizeof(request)));
    EXPECT_FALSE(peer.Hear().has_value()) << count;
  }
  EXPECT_TRUE(Eventually([&] { return server->local->connections() == 0; }));
  EXPECT_EQ(OpenFiles(), files);
}

TEST(RegionServer, OtherUsersStayOutside) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be somebody else";
  for (const bool any : {false, true}) {
    const auto server = StartServer(
        kMegabyte, {}, {.any_user = any, .ticket_life = kLong, .stranger_patience = kLong});
    const LocalInvitation invitation = server->Invite();
    const pid_t other = fork();
    if (other == 0) {
      if (setuid(12345) != 0) _exit(3);
      const auto arena =
          SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
      _exit(arena.ok() && (*arena)->Take(1) != nullptr ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(other, &status, 0), other);
    EXPECT_EQ(WEXITSTATUS(status), any ? 0 : 1);
  }
}

TEST(RegionServer, GivesAllPeersTogetherNoMoreRegionsThanItMay) {
  const auto server = StartServer(kMegabyte, {.max_regions = 3, .max_lent_by_peer = 8});
  RawPeer one(*server), other(*server);
  for (RawPeer* const peer : {&one, &other}) {
    ASSERT_TRUE(peer->Greet());
  }
  one.Say(regions::kTake, 0, 1);
  const uint64_t first = one.Hear()->region;
  EXPECT_NE(first, 0u);
  for (const bool is_given : {true, true, false}) {
    other.Say(regions::kTake, 0, 1);
    EXPECT_EQ(other.Hear()->region != 0, is_given);
  }
  const auto region = *SharedRegion::Create("emberd-test", 4096);
  regions::Request lend;
  lend.kind = regions::kLend;
  lend.region = 7;
  lend.bytes = 4096;
  regions::SendPacket(one.get(), lend, 0, region->descriptor());
  EXPECT_EQ(one.Hear()->region, 0u) << "what is lent counts, too";
  one.Say(regions::kDrop, first, 0);
  regions::SendPacket(one.get(), lend, 0, region->descriptor());
  EXPECT_EQ(one.Hear()->region, 7u);
}

TEST(RegionServer, KeepsFewOfThoseWhoShowNoTicket) {
  const auto server = StartServer();
  const auto guest = ConnectTo(*server);
  std::vector<std::unique_ptr<RawPeer>> strangers;
  for (int i = 0; i < 80; ++i) {
    strangers.push_back(std::make_unique<RawPeer>(*server));
    // A backlog that is full makes them wait.
    ASSERT_TRUE(Eventually([&] { return server->local->connections() > std::min(i + 1, 64); }));
  }
  EXPECT_FALSE(strangers[0]->Hear().has_value()) << "it was sent away";
  EXPECT_TRUE(Eventually([&] { return server->local->connections() <= 1 + 64; }));
  EXPECT_TRUE(strangers.back()->Greet());
  EXPECT_TRUE(guest->alive());
}

TEST(RegionServer, BorrowsOnlyWhereItMay) {
  const auto server = StartServer();
  const auto peer = ConnectTo(*server);
  const auto region = *SharedRegion::Create("emberd-test", 4096);
  EXPECT_FALSE(peer->LendRegion(7, *region));
  EXPECT_FALSE(server->regions.Find(7, 0, 1).ok());
  EXPECT_NE(peer->Take(1), nullptr);
}

TEST(RegionServer, BorrowsOnlyWhatItCanMapSafely) {
  const auto server = StartServer(256 * kMegabyte, {.max_lent_by_peer = 256});
  RawPeer lender(*server);
  ASSERT_TRUE(lender.Greet());
  lender.Say(regions::kLend, 7, 4096);  // without a file
  EXPECT_EQ(lender.Hear()->region, 0u);
  const auto lend = [&](int file, uint64_t name, uint64_t bytes) {
    regions::Request request;
    request.kind = regions::kLend;
    request.region = name;
    request.bytes = bytes;
    regions::SendPacket(lender.get(), request, 0, file);
    return lender.Hear()->region;
  };
  FileDescriptor open(memfd_create("emberd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open.get(), 4096), 0);
  EXPECT_EQ(lend(open.get(), 7, 4096), 0u) << "it could be made shorter";
  EXPECT_EQ(lend(lender.get(), 7, 4096), 0u) << "it is no memory";
  const auto region = *SharedRegion::Create("emberd-test", 4096);
  EXPECT_EQ(lend(region->descriptor(), 7, 8192), 0u) << "it is shorter";
  EXPECT_EQ(lend(region->descriptor(), 7, 4096), 7u);
  EXPECT_TRUE(server->regions.Find(7, 0, 4096).ok());
  uint64_t name = 8;
  while (lend(region->descriptor(), name, 4096) == name) ++name;
  EXPECT_EQ(name, 7u + 256) << "as many as one peer may lend";
  lender.Say(regions::kDrop, 7, 0);
  EXPECT_EQ(lend(region->descriptor(), name, 4096), name);
  EXPECT_EQ(server->regions.peers(), 1);
}

TEST(SharedRegion, RefusesFilesWhoseSizeCouldChange) {
  FileDescriptor open(memfd_create("emberd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open.get(), 4096), 0);
  EXPECT_THAT(SharedRegion::Map(std::move(open), 4096).status().message(), HasSubstr("not sealed"));
  const auto sealed = *SharedRegion::Create("emberd-test", 4096);
  EXPECT_THAT(SharedRegion::Map(FileDescriptor(dup(sealed->descriptor())), 8192).status().message(),
              HasSubstr("has 4096 bytes; it must have 8192"));
  EXPECT_TRUE(SharedRegion::Map(FileDescriptor(dup(sealed->descriptor())), 4096).ok());
  EXPECT_FALSE(SharedRegion::Map(FileDescriptor(), 4096).ok());
}

// The failure that this would catch: a peer that is killed leaves regions, mappings or descriptors
// at the server, whatever it was doing.
TEST(RegionServer, KilledPeersLeaveNothing) {
  const auto server = StartServer();
  const int files = OpenFiles();
  const int mappings = Mappings();
  int at_work = 0;
  for (int round = 0; round < 200; ++round) {
    const LocalInvitation invitation = server->Invite();
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      auto arena =
          SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
      while (arena.ok()) {
        const auto block = (*arena)->Take(1 << 20);
        if (block != nullptr) {
          std::memset(block->data(), round, 1 << 20);
          const uint64_t place[] = {block->region(), block->offset()};
          (void)!write(pipe_ends[1], place, sizeof(place));
          block->Lend();  // the next one is of another region
        }
      }
      _exit(1);
    }
    uint64_t place[2] = {};
    ASSERT_EQ(read(pipe_ends[0], place, sizeof(place)), static_cast<ssize_t>(sizeof(place)));
    auto work = server->regions.Find(place[0], place[1], 1 << 20);
    if (round % 3 == 0) absl::SleepFor(absl::Microseconds(100 * (round % 7)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    if (!work.ok()) continue;  // it has given the block back
    ++at_work;
    // Work goes on, to its end, and finds what the peer had written.
    const std::string expected(1 << 20, static_cast<char>(round));
    EXPECT_EQ(std::memcmp(work->get(), expected.data(), expected.size()), 0) << round;
    std::memset(work->get(), 0, 1 << 20);
  }
  EXPECT_GT(at_work, 0);
  EXPECT_TRUE(Eventually([&] { return server->regions.peers() == 0; }));
  EXPECT_EQ(server->regions.regions(), 0);
  EXPECT_TRUE(
      Eventually([&] { return server->regions.bytes() == 0; }));  // after they have been unmapped
  EXPECT_EQ(OpenFiles(), files);
  EXPECT_EQ(Mappings(), mappings);
}

}  // namespace region_server_test
}  // namespace emberd::region_ends
