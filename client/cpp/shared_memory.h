// The memory that a client shares with one coordinator, if both are on one machine: see
// shared_memory.proto. And the gradients of updates in it. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/regions.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"
#include "emberd/v1/batch.pb.h"
#include "emberd/v1/shared_memory.pb.h"

namespace emberd::client {

// Sending a step waits at most this long for its coordinator to give more memory. One that works
// gives it in far less; without the memory, the step goes by TCP.
inline constexpr absl::Duration kSendPatience = absl::Milliseconds(500);

// Thread-safe.
class SharedMemory {
 public:
  // `kind`: kShared or kAuto. `ask`: the coordinator.
  SharedMemory(TransportKind kind, ArenaLink::Ask ask) : kind_(kind), link_(std::move(ask)) {}

  // Null where there is none: the coordinator is on another machine, or does not want to share. May
  // wait for an answer of the coordinator, until `deadline` or two seconds, once, and again when it
  // has been restarted.
  std::shared_ptr<SharedArena> Arena(absl::Time deadline = absl::InfiniteFuture()) {
    return link_.Get(deadline);
  }
  // A block for `bytes` bytes that would otherwise be sent. Null if they are too few to be worth
  // it, or there is no memory for them by then.
  std::shared_ptr<SharedBlock> Take(size_t bytes, absl::Time deadline);

 private:
  const TransportKind kind_;
  ArenaLink link_;
};

// Puts the tensors of a request into a block, each from a multiple of 64 bytes on.
class BlockWriter {
 public:
  explicit BlockWriter(std::shared_ptr<SharedBlock> block) : block_(std::move(block)) {}
  void Write(const void* bytes, size_t size);

 private:
  const std::shared_ptr<SharedBlock> block_;
  size_t size_ = 0;
};

// `size` bytes from `offset` on in the block's region.
void SetPlace(const SharedBlock& block, uint64_t offset, size_t size, v1::SharedBlock* place);

// Bytes that the ids and weights take there.
size_t BlockBytes(absl::Span<const FeatureIds> features);

// Whether the rows of a gradient lie one after the other.
bool IsTogether(const FeatureGradient& gradient, int64_t dim);
// Puts them one after the other, as they travel.
void CopyGradient(const FeatureGradient& gradient, int64_t dim, WireType type, char* to);

// The gradients of one update in memory that is shared with the coordinator. Internal to the
// client.
//
// Not thread-safe. Keeps the blocks that the update names until it goes.
class SharedGradients {
 public:
  // No memory: every Put is refused.
  SharedGradients() = default;
  // `own`: blocks in which the caller may have put gradients already.
  SharedGradients(SharedMemory* memory, std::vector<std::shared_ptr<SharedBlock>> own)
      : memory_(memory), own_(std::move(own)) {}

  // Takes memory for the gradients that have to be copied; before the first Put. `dims`: the
  // embedding_dim of each.
  void Reserve(absl::Span<const FeatureGradient> gradients, absl::Span<const int64_t> dims,
               WireType type, absl::Time deadline);
  // Puts the next gradient there, unless it is there already, and fills the message but for the
  // feature's name. False if there is no memory for it.
  bool Put(const FeatureGradient& gradient, int64_t dim, WireType type,
           v1::FeatureGradient* message);

  void Lend();    // when the update is sent
  void Settle();  // when it has been answered
  // When it will not be answered: shards may make it all the same, now or later. They see the
  // gradients as they are now, whatever the caller writes to its memory from here on.
  void Part();

 private:
  // The caller's block that holds a gradient as it has to travel.
  std::shared_ptr<SharedBlock> Find(const FeatureGradient& gradient, int64_t dim,
                                    WireType type) const;

  SharedMemory* memory_ = nullptr;
  std::vector<std::shared_ptr<SharedBlock>> own_;
  // The block of each gradient, looked for only once: if it is parted later, it would not be found
  // again, and `copies_` has no room for the gradient.
  std::vector<std::shared_ptr<SharedBlock>> found_;
  size_t put_ = 0;  // of them
  std::shared_ptr<SharedBlock> copies_;
  size_t copied_ = 0;                               // bytes in it
  std::vector<std::shared_ptr<SharedBlock>> used_;  // what the update names
};

}  // namespace emberd::client
