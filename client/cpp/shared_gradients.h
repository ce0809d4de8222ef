// The gradients of one update in memory that is shared with the coordinator. Internal to the
// client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/shared_arena.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "emberd/v1/batch.pb.h"

namespace emberd::client {

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
               WireType type);
  // Puts a gradient there, unless it is there already, and fills the message but for the feature's
  // name. False if there is no memory for it.
  bool Put(const FeatureGradient& gradient, int64_t dim, WireType type,
           v1::FeatureGradient* message);

  // The update is sent; it has been answered.
  void Lend();
  void Settle();
  // It will not be answered, and may be made later all the same, or now: with the gradients of now,
  // whatever the caller does to its memory from here on.
  void Part();

 private:
  // The caller's block that holds a gradient as it has to travel.
  std::shared_ptr<SharedBlock> Find(const FeatureGradient& gradient, int64_t dim,
                                    WireType type) const;

  SharedMemory* memory_ = nullptr;
  std::vector<std::shared_ptr<SharedBlock>> own_;
  std::shared_ptr<SharedBlock> copies_;
  size_t copied_ = 0;                               // bytes in it
  std::vector<std::shared_ptr<SharedBlock>> used_;  // what the update names
};

}  // namespace emberd::client
