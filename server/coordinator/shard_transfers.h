// A save or restore that runs on all shards, as seen by the coordinator that began it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/coordinator/shard_set.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// Hears, now and then, how far all shards are together. An error ends the work.
using BytesReport = std::function<absl::Status(int64_t bytes, int64_t total_bytes)>;

// Not thread-safe. Its destructor makes the shards give up what is not over.
class ShardTransfers {
 public:
  using Results = std::vector<internal::v1::GetTransferResponse>;  // by shard

  // `shards` must outlive it.
  explicit ShardTransfers(const ShardSet& shards);
  ~ShardTransfers();
  ShardTransfers(const ShardTransfers&) = delete;
  ShardTransfers& operator=(const ShardTransfers&) = delete;

  // What the shards know it by.
  uint64_t id() const { return id_; }

  // Blocks until all shards are done, or one of them has failed. CANCELLED with the context.
  absl::StatusOr<Results> Await(rpc::CallContext* context, const BytesReport& report);
  // The shards may forget it.
  void Keep() { over_ = true; }

 private:
  absl::StatusOr<Results> Ask(const std::string& trace);

  const ShardSet& shards_;
  const uint64_t id_;
  bool over_ = false;
};

}  // namespace emberd::server
