// Both ends of shared memory, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "absl/time/time.h"
#include "base/local_server.h"
#include "base/regions.h"

namespace emberd::region_ends {

inline constexpr size_t kMegabyte = size_t{1} << 20;
inline constexpr absl::Duration kLong = absl::Minutes(2);

// Regions behind a socket.
struct Server {
  Server(RegionServer::Options options, LocalServer::Options local_options)
      : regions(std::move(options)), local(*LocalServer::Start(local_options, &regions, nullptr)) {}
  LocalInvitation Invite() { return local->Invite({}); }

  RegionServer regions;
  const std::unique_ptr<LocalServer> local;
};

inline std::unique_ptr<Server> StartServer(int64_t max_bytes = 256 * kMegabyte,
                                           RegionServer::Options options = {},
                                           const LocalServer::Options& local = {
                                               .ticket_life = kLong, .stranger_patience = kLong}) {
  options.name = "emberd-test";
  options.max_bytes = max_bytes;
  return std::make_unique<Server>(std::move(options), local);
}

inline std::shared_ptr<SharedArena> ConnectTo(Server& server) {
  const LocalInvitation invitation = server.Invite();
  auto arena =
      SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(), kLong);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

}  // namespace emberd::region_ends
