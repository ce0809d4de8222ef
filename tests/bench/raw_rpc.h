// The raw-RPC limit of this machine: what gRPC streams of 1 MiB messages over loopback do with
// bytes that nobody has to make or read. Other rates are shown as a share of it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace emberd::bench {

// A server, and a client in this process that calls it: directly (one hop), or through a relay that
// hands every message on as it is (two hops, as from a shard through a coordinator to a trainer).
class RawRpc {
 public:
  static absl::StatusOr<std::unique_ptr<RawRpc>> Start(bool relay);
  virtual ~RawRpc() = default;
  // One call, in which the server sends `bytes` bytes from memory and the client copies them to a
  // buffer of its own, as a trainer must.
  virtual absl::Status Receive(int64_t bytes) = 0;
  // One call, in which the client sends `bytes` bytes from memory and the server drops them.
  virtual absl::Status Send(int64_t bytes) = 0;
};

}  // namespace emberd::bench
