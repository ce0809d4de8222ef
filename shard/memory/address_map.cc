#include "shard/memory/address_map.h"

#include <algorithm>

namespace emberd::shard {

std::optional<int64_t> AddressMap::Place(int64_t bytes) {
  int64_t address = 0;
  for (const auto& [begin, size] : taken_) {
    if (begin - address >= bytes) break;
    address = begin + size;
  }
  if (bytes_ - address < bytes) return std::nullopt;
  taken_[address] = bytes;
  used_ += bytes;
  return address;
}

void AddressMap::Free(int64_t address) {
  const auto found = taken_.find(address);
  if (found == taken_.end()) return;
  used_ -= found->second;
  taken_.erase(found);
}

int64_t AddressMap::largest_gap() const {
  int64_t largest = 0, address = 0;
  for (const auto& [begin, size] : taken_) {
    largest = std::max(largest, begin - address);
    address = begin + size;
  }
  return std::max(largest, bytes_ - address);
}

}  // namespace emberd::shard
