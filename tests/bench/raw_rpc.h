// The raw-RPC limit of this machine: what gRPC over loopback does with bytes that nobody has to
// make or read. Other rates are shown as a share of it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace emberd::bench {

// A server that answers every call with `response_bytes` bytes from memory, and a client that
// copies them to a buffer of its own, as a trainer must.
class RawRpc {
 public:
  static absl::StatusOr<std::unique_ptr<RawRpc>> Start(int64_t response_bytes);
  virtual ~RawRpc() = default;
  // One call. Sends `request_bytes` bytes.
  virtual absl::Status Call(int64_t request_bytes) = 0;
};

}  // namespace emberd::bench
