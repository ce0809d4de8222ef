// Blocks of floats that are used again. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace emberd::client {

// Memory fresh from the system costs a page fault for every 4 KiB; a step's activations are tens of
// MiB. Thread-safe. Blocks may outlive the pool.
class FloatPool {
 public:
  FloatPool() : free_(std::make_shared<FreeList>()) {}

  // `size` floats of any value, 64-byte aligned, which come back when the last reference goes.
  std::shared_ptr<float> Take(size_t size) {
    Block block = free_->Take(size);
    if (block.memory == nullptr) block = Allocate(size);
    float* floats = block.memory.get();
    // The deleter must be copyable; its copies share the block.
    auto held = std::make_shared<Block>(std::move(block));
    return {floats, [list = free_, held](float*) { list->Give(std::move(*held)); }};
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  struct Block {
    std::unique_ptr<float, Free> memory;
    size_t size = 0;
  };

  // Steps of a run are alike: a few blocks of the largest size serve all of them.
  class FreeList {
   public:
    Block Take(size_t size) {
      absl::MutexLock lock(&mutex_);
      for (Block& block : blocks_) {
        if (block.size < size) continue;
        Block taken = std::move(block);
        std::swap(block, blocks_.back());
        blocks_.pop_back();
        return taken;
      }
      return {};
    }
    void Give(Block block) {
      absl::MutexLock lock(&mutex_);
      if (blocks_.size() == kMostFree) blocks_.erase(blocks_.begin());
      blocks_.push_back(std::move(block));
    }

   private:
    static constexpr size_t kMostFree = 4;
    absl::Mutex mutex_;
    std::vector<Block> blocks_ ABSL_GUARDED_BY(mutex_);
  };

  static Block Allocate(size_t size) {
    constexpr size_t kAlignment = 64;
    const size_t bytes = (size * sizeof(float) / kAlignment + 1) * kAlignment;
    auto* memory = static_cast<float*>(std::aligned_alloc(kAlignment, bytes));
    if (memory == nullptr) std::abort();  // as `new` ends a program that catches nothing
    return {std::unique_ptr<float, Free>(memory), size};
  }

  std::shared_ptr<FreeList> free_;
};

}  // namespace emberd::client
