// Where tables stand in the memory of an emulated SparseCore. The addresses are those of the chip
// that is emulated; in this machine's memory rows never move.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace emberd::shard {

// Not thread-safe.
class AddressMap {
 public:
  explicit AddressMap(int64_t bytes) : bytes_(bytes) {}

  // The lowest address at which `bytes` > 0 fit; nothing: there is none.
  std::optional<int64_t> Place(int64_t bytes);
  void Free(int64_t address);

  int64_t bytes() const { return bytes_; }
  int64_t free_bytes() const { return bytes_ - used_; }
  int64_t largest_gap() const;

 private:
  const int64_t bytes_;
  int64_t used_ = 0;
  std::map<int64_t, int64_t> taken_;  // address -> bytes
};

}  // namespace emberd::shard
