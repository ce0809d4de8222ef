// What a MemoryManager knows of one model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shard/memory/memory_manager.h"

namespace emberd::shard {

// All but `file` is guarded by the manager's mutex_; `file` by swapping_.
class MemoryManager::Room : public std::enable_shared_from_this<Room> {
 public:
  struct Stack {
    std::string name;
    int64_t bytes = 0;
    int64_t address = -1;
  };

  std::shared_ptr<MemoryManager> manager;
  std::string model;
  std::vector<Stack> stacks;
  int64_t bytes = 0;  // of all stacks
  RowsPlace place = RowsPlace::kSparseCore;
  bool moving = true;   // Take, Hold or an eviction is at it
  bool pinned = false;  // by an operator
  bool gone = false;
  int uses = 0;
  int64_t last_use = 0;
  std::weak_ptr<Evictable> rows;  // expired: they may not move yet, or not any more
  std::optional<SpillFile> file;  // of spilled rows
  int64_t file_bytes = 0;
  absl::Status damage;  // why the file cannot be read any more
};

}  // namespace emberd::shard
