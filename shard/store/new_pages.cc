#include "shard/store/new_pages.h"

#include <algorithm>

#include <unistd.h>

#include "base/mapped_memory.h"

namespace emberd::shard {

NewPages::NewPages(const StackStore& store) : store_(store) {
  const int64_t small = sysconf(_SC_PAGESIZE);
  const auto add = [&](int64_t row_bytes, const MappedMemory& memory) {
    arrays_.push_back({row_bytes, memory.huge_pages() ? int64_t{kHugePage} : small, {}});
  };
  add(static_cast<int64_t>(store.row_bytes()), store.weights_memory());
  for (const StackStore::Slot& slot : store.slots()) {
    add(slot.columns * static_cast<int64_t>(sizeof(float)), slot.memory);
  }
}

void NewPages::Add(int64_t row) {
  if (store_.Touched(row, row + 1)) return;
  for (Array& array : arrays_) {
    const int64_t page = row * array.row_bytes / array.page_bytes;
    if (array.pages.contains(page)) continue;
    const int64_t begin = page * array.page_bytes / array.row_bytes;
    const int64_t end = ((page + 1) * array.page_bytes - 1) / array.row_bytes + 1;
    if (store_.Touched(begin, std::min(end, store_.rows()))) continue;
    array.pages.insert(page);
  }
}

int64_t NewPages::bytes() const {
  int64_t bytes = 0;
  for (const Array& array : arrays_) {
    bytes += static_cast<int64_t>(array.pages.size()) * array.page_bytes;
  }
  return bytes;
}

}  // namespace emberd::shard
