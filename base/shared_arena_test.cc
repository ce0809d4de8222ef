// A region is taken by two ends that do not trust one another. What must hold: whatever a peer
// says, the server's memory is only where the peer's regions are, and a peer that is gone leaves
// nothing behind; and memory that the server may still be writing to is never used for anything
// else.
//
// Covers: arena_link.cc, region_protocol.cc, region_server.cc, shared_region.cc
#include "base/shared_arena.h"

#include <cstring>
#include <fstream>
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
#include "base/arena_link.h"
#include "base/region_server.h"

namespace emberd {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMegabyte = size_t{1} << 20;

std::unique_ptr<RegionServer> StartServer(int64_t max_bytes = 256 * kMegabyte) {
  auto server = RegionServer::Start({.name = "emberd-test", .max_bytes = max_bytes});
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

std::shared_ptr<SharedArena> ConnectTo(RegionServer& server) {
  const RegionServer::Invitation invitation = server.Invite();
  auto arena = SharedArena::Connect(invitation.socket, invitation.ticket);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

// Waits for what the server's thread does by itself.
template <typename Check>
bool Soon(const Check& check) {
  for (int i = 0; i < 1000 && !check(); ++i) absl::SleepFor(absl::Milliseconds(5));
  return check();
}

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

TEST(ArenaLink, FindsAServerThatWasRestarted) {
  auto server = StartServer();
  int asked = 0;
  ArenaLink link([&] {
    ++asked;
    return server->Invite();
  });
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
    ArenaLink link([&]() -> absl::StatusOr<RegionServer::Invitation> {
      ++asked;
      return silent ? absl::UnavailableError("") : absl::UnimplementedError("");
    });
    for (const absl::Time end = absl::Now() + absl::Milliseconds(1300); absl::Now() < end;) {
      EXPECT_EQ(link.Get(), nullptr);
      absl::SleepFor(absl::Milliseconds(5));
    }
    // After 0, 200, 400, ..., 1200 ms, or after 0, 200 and 600 ms.
    EXPECT_GE(asked, 2);
    EXPECT_LE(asked, silent ? 7 : 3);
  }
}

TEST(SharedArena, BothEndsSeeTheSameMemory) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(1000);
  ASSERT_NE(block, nullptr);
  std::strcpy(block->data(), "from the peer");
  const auto found = server->Find(block->region(), block->offset(), 1000);
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
  EXPECT_EQ(server->regions(), 1);
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
  const auto still_at_work = server->Find(region, lent->offset(), 100);
  ASSERT_TRUE(still_at_work.ok());
  lent = nullptr;
  EXPECT_NE(arena->Take(100)->region(), region);
  other = nullptr;  // the last block there
  EXPECT_TRUE(Soon([&] { return server->regions() == 1; }));
  EXPECT_EQ(server->bytes(), 128 * int64_t{kMegabyte}) << "the work has not ended";
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
  const auto seen = server->Find(region, block->offset(), 100'000);
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
  EXPECT_EQ((*server->Find(region, neighbour->offset(), 1)).get()[0], 3);
  EXPECT_NE(arena->Take(100)->region(), 0u);
}

TEST(SharedArena, LendsRegionsToOtherServers) {
  const auto giver = StartServer();
  const auto borrower = StartServer(/*max_bytes=*/0);
  const auto block = ConnectTo(*giver)->Take(1000);
  ASSERT_NE(block, nullptr);
  auto lender = ConnectTo(*borrower);
  const uint64_t name = block->region();
  const std::shared_ptr<SharedRegion> region = giver->Region(name);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(giver->Region(name + 1), nullptr);
  EXPECT_FALSE(borrower->Find(name, block->offset(), 1000).ok());
  EXPECT_TRUE(lender->LendRegion(name, *region));
  EXPECT_FALSE(lender->LendRegion(name, *region)) << "the name is taken";
  EXPECT_FALSE(lender->LendRegion(0, *region));
  const auto found = borrower->Find(name, block->offset(), 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  std::strcpy(found->get(), "from the borrower");
  EXPECT_STREQ(block->data(), "from the borrower");
  EXPECT_FALSE(borrower->Find(name, region->size(), 1).ok());
  EXPECT_EQ(borrower->bytes(), 0);

  lender->TakeBack(name);
  EXPECT_TRUE(Soon([&] { return !borrower->Find(name, 0, 1).ok(); }));
  std::strcpy(found->get(), "still mapped");
  EXPECT_STREQ(block->data(), "still mapped");
  EXPECT_TRUE(lender->LendRegion(name, *region));
  EXPECT_EQ(borrower->regions(), 1);
  lender = nullptr;  // as if it had died
  EXPECT_TRUE(Soon([&] { return borrower->regions() == 0; }));
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
  EXPECT_EQ(server->bytes(), 74 * int64_t{kMegabyte});
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
  const RegionServer::Invitation invitation = server->Invite();
  ASSERT_TRUE(SharedArena::Connect(invitation.socket, invitation.ticket).ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, invitation.ticket).ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, std::string(16, 'x')).ok());
  EXPECT_FALSE(SharedArena::Connect(invitation.socket, "short").ok());
  EXPECT_FALSE(SharedArena::Connect("", invitation.ticket).ok());
  EXPECT_FALSE(SharedArena::Connect(std::string(200, 'x'), invitation.ticket).ok());
  EXPECT_THAT(SharedArena::Connect("emberd-test/nobody", std::string(16, 'x')).status().message(),
              HasSubstr("nobody listens there on this machine"));
  const auto late = RegionServer::Start(
      {.name = "emberd-test", .max_bytes = 1, .ticket_life = absl::Nanoseconds(1)});
  const RegionServer::Invitation expired = (*late)->Invite();
  EXPECT_FALSE(SharedArena::Connect(expired.socket, expired.ticket).ok());
}

TEST(RegionServer, FindsNothingOutsideOfRegions) {
  const auto server = StartServer();
  const auto arena = ConnectTo(*server);
  const auto block = arena->Take(100);
  const uint64_t region = block->region();
  const uint64_t size = 64 * kMegabyte;
  EXPECT_TRUE(server->Find(region, 0, size).ok());
  EXPECT_TRUE(server->Find(region, size, 0).ok());
  const std::pair<uint64_t, uint64_t> outside[] = {{1, size},         {size, 1},
                                                   {0, size + 1},     {~uint64_t{0}, 1},
                                                   {1, ~uint64_t{0}}, {~uint64_t{0}, ~uint64_t{0}}};
  for (const auto& [offset, bytes] : outside) {
    EXPECT_EQ(server->Find(region, offset, bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(server->Find(region + 1, 0, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(server->Find(0, 0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

// Sends packets of a peer's own making.
class RawPeer {
 public:
  explicit RawPeer(RegionServer& server)
      : invitation_(server.Invite()), socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const regions::AbstractAddress address(invitation_.socket);
    EXPECT_EQ(connect(socket_.get(), address.get(), address.length), 0);
  }
  void Say(regions::Kind kind, uint64_t region, uint64_t bytes) {
    regions::Request request;
    request.kind = kind;
    request.region = region;
    request.bytes = bytes;
    std::memcpy(request.ticket, invitation_.ticket.data(), regions::kTicketBytes);
    regions::SendPacket(socket_.get(), request, 0);
  }
  std::optional<regions::Answer> Hear() { return regions::ReceiveAnswer(socket_.get(), &file); }
  int get() const { return socket_.get(); }

  FileDescriptor file;

 private:
  const RegionServer::Invitation invitation_;
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
  odd.Say(regions::kHello, 0, 0);
  EXPECT_TRUE(odd.Hear().has_value());
  odd.Say(static_cast<regions::Kind>(77), 0, 0);
  EXPECT_FALSE(odd.Hear().has_value());
  EXPECT_TRUE(Soon([&] { return server->peers() == 0; }));
}

TEST(RegionServer, GivesNoMoreThanItHasAndTakesBackOnlyTheOwners) {
  const auto server = StartServer(kMegabyte);
  RawPeer greedy(*server);
  greedy.Say(regions::kHello, 0, 0);
  ASSERT_TRUE(greedy.Hear().has_value());
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
  thief.Say(regions::kHello, 0, 0);
  ASSERT_TRUE(thief.Hear().has_value());
  thief.Say(regions::kDrop, region, 0);
  thief.Say(regions::kTake, 0, 1);
  ASSERT_TRUE(thief.Hear().has_value());
  EXPECT_TRUE(server->Find(region, 0, 8192).ok());
  greedy.Say(regions::kDrop, region, 0);
  EXPECT_TRUE(Soon([&] { return !server->Find(region, 0, 1).ok(); }));
}

TEST(RegionServer, BorrowsOnlyWhatItCanMapSafely) {
  const auto server = StartServer();
  RawPeer lender(*server);
  lender.Say(regions::kHello, 0, 0);
  ASSERT_TRUE(lender.Hear().has_value());
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
  EXPECT_TRUE(server->Find(7, 0, 4096).ok());
  uint64_t name = 8;
  while (lend(region->descriptor(), name, 4096) == name) ++name;
  EXPECT_EQ(name, 7u + 256) << "as many as one peer may lend";
  lender.Say(regions::kDrop, 7, 0);
  EXPECT_EQ(lend(region->descriptor(), name, 4096), name);
  EXPECT_EQ(server->peers(), 1);
}

TEST(SharedRegion, RefusesFilesWhoseSizeCouldChange) {
  FileDescriptor open(memfd_create("emberd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open.get(), 4096), 0);
  FileDescriptor copy(dup(open.get()));
  EXPECT_THAT(SharedRegion::Map(std::move(copy), 8192).status().message(),
              HasSubstr("has 4096 bytes; it must have 8192"));
  EXPECT_THAT(SharedRegion::Map(std::move(open), 4096).status().message(), HasSubstr("not sealed"));
  EXPECT_FALSE(SharedRegion::Map(FileDescriptor(), 4096).ok());
}

// The failure that this would catch: a peer that is killed leaves regions, mappings or descriptors
// at the server, whatever it was doing.
TEST(RegionServer, KilledPeersLeaveNothing) {
  const auto server = StartServer();
  const int files = OpenFiles();
  const int mappings = Mappings();
  for (int round = 0; round < 200; ++round) {
    const RegionServer::Invitation invitation = server->Invite();
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      auto arena = SharedArena::Connect(invitation.socket, invitation.ticket);
      while (arena.ok()) {
        const auto block = (*arena)->Take(1 << 20);
        if (block != nullptr) {
          const uint64_t place[] = {block->region(), block->offset()};
          (void)!write(pipe_ends[1], place, sizeof(place));
          std::memset(block->data(), round, 1 << 20);
          block->Lend();  // the next one is of another region
        }
      }
      _exit(1);
    }
    uint64_t place[2] = {};
    ASSERT_EQ(read(pipe_ends[0], place, sizeof(place)), static_cast<ssize_t>(sizeof(place)));
    auto work = server->Find(place[0], place[1], 1 << 20);
    if (round % 3 == 0) absl::SleepFor(absl::Microseconds(100 * (round % 7)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    if (work.ok()) std::memset(work->get(), 0, 1 << 20);  // work goes on, to its end
  }
  EXPECT_TRUE(Soon([&] { return server->peers() == 0; }));
  EXPECT_EQ(server->regions(), 0);
  EXPECT_EQ(server->bytes(), 0);
  EXPECT_EQ(OpenFiles(), files);
  EXPECT_EQ(Mappings(), mappings);
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

}  // namespace
}  // namespace emberd
