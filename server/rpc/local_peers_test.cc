#include "server/rpc/local_peers.h"

#include <gtest/gtest.h>

#include "base/lanes.h"
#include "base/local_server.h"
#include "base/regions.h"
#include "base/steady_time.h"

namespace emberd::rpc {
namespace local_peers_test {

TEST(SharedRegionsTest, PeersAreInvitedUnlessAllIsToGoByTcp) {
  v1::ClusterConfig cluster;
  cluster.mutable_budgets()->set_shared_memory_bytes(1 << 20);
  for (const LocalPeers peers : {LocalPeers::kClients, LocalPeers::kCoordinators}) {
    cluster.set_transport(v1::ClusterConfig::TCP);
    EXPECT_EQ(MakeRegions(cluster, peers), nullptr);
    EXPECT_EQ(ServeLocally(cluster, peers, nullptr, nullptr), nullptr);
    cluster.set_transport(v1::ClusterConfig::AUTO);
    const auto regions = MakeRegions(cluster, peers);
    ASSERT_NE(regions, nullptr);
    const auto local = ServeLocally(cluster, peers, regions.get(), nullptr);
    const auto invitation = InvitePeer(local.get(), {});
    ASSERT_TRUE(invitation.ok()) << invitation.status();
    auto arena = SharedArena::Connect(invitation->socket(), invitation->ticket(),
                                      absl::InfiniteFuture(), absl::Minutes(2));
    ASSERT_TRUE(arena.ok()) << arena.status();
    const auto all = (*arena)->Take(1 << 20);
    EXPECT_NE(all, nullptr);
    EXPECT_EQ((*arena)->Take(1 << 20), nullptr) << "over the budget";
    // A coordinator lends a shard what a client has; a client has nothing to lend.
    const auto region = *SharedRegion::Create("emberd-test", 4096);
    EXPECT_EQ((*arena)->LendRegion(7, *region), peers == LocalPeers::kCoordinators);
  }
  EXPECT_EQ(InvitePeer(nullptr, {}).status(),
            absl::UnimplementedError("this process shares no memory"));
}

// Would catch: a connection that is given to the other of the two.
TEST(LocalServerTest, OneSocketLetsInBothKinds) {
  RegionServer regions({.max_bytes = 1 << 20});
  LaneServer lanes([](LaneCall*) { return LaneAnswer(); });
  const auto server = *LocalServer::Start({}, &regions, &lanes);
  const LocalInvitation first = server->Invite({}), second = server->Invite({});
  EXPECT_EQ(first.socket, second.socket);
  const absl::Time late = SteadyNow() + absl::Minutes(2);
  const auto memory = ConnectLocal(first, LocalKind::kMemory, late);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(regions.peers(), 1);
  EXPECT_EQ(lanes.lanes(), 0);
  const auto calls = ConnectLocal(second, LocalKind::kCalls, late);
  ASSERT_TRUE(calls.ok()) << calls.status();
  EXPECT_EQ(regions.peers(), 1);
  EXPECT_EQ(lanes.lanes(), 1);
}

}  // namespace local_peers_test
}  // namespace emberd::rpc
