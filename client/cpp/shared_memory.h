// The memory that a client shares with one coordinator, if both are on one machine: see
// shared_memory.proto. Internal to the client.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/types/span.h"
#include "base/arena_link.h"
#include "base/shared_arena.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"
#include "emberd/v1/shared_memory.pb.h"

namespace emberd::client {

// Tensors in shared memory begin at multiples of so many bytes of their block.
inline constexpr size_t kTensorAlignment = 64;
inline size_t AlignTensor(size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// Thread-safe.
class SharedMemory {
 public:
  // `ask`: the coordinator.
  SharedMemory(TransportKind kind, ArenaLink::Ask ask) : kind_(kind), link_(std::move(ask)) {}

  // Null where there is none: the coordinator is on another machine, or does not want to share. May
  // wait for an answer of the coordinator, once, and again when it has been restarted.
  std::shared_ptr<SharedArena> Arena() {
    return kind_ == TransportKind::kTcp ? nullptr : link_.Get();
  }
  // A block for `bytes` bytes that would otherwise be sent. Null if they are too few to be worth
  // it, or there is no memory for them.
  std::shared_ptr<SharedBlock> Take(size_t bytes);

 private:
  const TransportKind kind_;
  ArenaLink link_;
};

// Puts the tensors of a request into a block, each from a multiple of 64 bytes on.
class BlockWriter {
 public:
  explicit BlockWriter(std::shared_ptr<SharedBlock> block) : block_(std::move(block)) {}
  void Write(const void* bytes, size_t size);
  // What has been written.
  v1::SharedBlock place() const;
  const std::shared_ptr<SharedBlock>& block() const { return block_; }

 private:
  const std::shared_ptr<SharedBlock> block_;
  size_t size_ = 0;
};

// Bytes that the ids and weights take there.
size_t BlockBytes(absl::Span<const FeatureIds> features);

}  // namespace emberd::client
