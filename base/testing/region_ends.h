// Both ends of shared memory, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "base/region_server.h"
#include "base/shared_arena.h"

namespace emberd::region_ends {

inline constexpr size_t kMegabyte = size_t{1} << 20;

inline std::unique_ptr<RegionServer> StartServer(int64_t max_bytes = 256 * kMegabyte,
                                                 RegionServer::Options options = {}) {
  options.name = "emberd-test";
  options.max_bytes = max_bytes;
  auto server = RegionServer::Start(std::move(options));
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

inline std::shared_ptr<SharedArena> ConnectTo(RegionServer& server) {
  const RegionServer::Invitation invitation = server.Invite();
  auto arena = SharedArena::Connect(invitation.socket, invitation.ticket);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

}  // namespace emberd::region_ends
