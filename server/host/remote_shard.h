// The two calls of a step, Gather and Apply, as a coordinator makes them of a shard behind gRPC.
// Long payloads lie in memory that both have, if there is some; a shard that does not know the
// place, because it has been restarted, is sent them after all.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/shared_arena.h"
#include "server/host/shard_backend.h"
#include "server/rpc/message.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace emberd::rpc {

class ClientMessageStream;

}  // namespace emberd::rpc

namespace emberd::host {

// Says which shard an error came from, and sees that a shard out of reach is looked for without
// pause: gRPC asks for the address of a name that is gone, as a stopped container's is, only every
// two minutes in the end. Thread-safe.
class Reconnector {
 public:
  Reconnector(std::shared_ptr<grpc::Channel> channel, std::string context)
      : channel_(std::move(channel)), context_(std::move(context)) {}

  const std::string& context() const { return context_; }
  absl::Status Explain(const absl::Status& status);

 private:
  void LookAgain();

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string context_;
  std::atomic<int64_t> last_ms_{0};
};

// The memory that a coordinator has with one shard. Thread-safe.
class ShardMemory {
 public:
  // `from_bytes`: see RemoteShardOptions::share_from_bytes. `budget`: that of messages.
  ShardMemory(int64_t from_bytes, rpc::MemoryBudget budget, ArenaLink::Ask ask)
      : from_bytes_(from_bytes), budget_(std::move(budget)), link_(std::move(ask)) {}
  // Null if so few bytes are not worth it, or there is no memory for them.
  std::shared_ptr<SharedBlock> Take(int64_t bytes);
  // See ShardBackend.
  bool Lend(const NamedRegion& region);
  void TakeBackRegions();

 private:
  // Lent regions that are forgotten here.
  void TakeBackUnused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t from_bytes_;
  const rpc::MemoryBudget budget_;
  ArenaLink link_;

  Mutex mutex_;
  std::weak_ptr<SharedArena> lent_to_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, std::weak_ptr<SharedRegion>> lent_ ABSL_GUARDED_BY(mutex_);
};

using OpenStream = std::function<std::unique_ptr<rpc::ClientMessageStream>()>;

// `open` begins a call; it, `memory` and `reconnector` must outlive the result.
std::unique_ptr<GatherCall> MakeRemoteGather(OpenStream open, GatherCommand command,
                                             ShardMemory* memory, Reconnector* reconnector);
std::unique_ptr<ApplyCall> MakeRemoteApply(OpenStream open, const ApplyCommand& command,
                                           Reconnector* reconnector);

}  // namespace emberd::host
