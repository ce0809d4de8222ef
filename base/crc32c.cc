#include "base/crc32c.h"

#include <algorithm>

#include <isa-l/crc.h>

namespace emberd {

uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const char> bytes) {
  // The library takes an int, and leaves the inversions before and after to its caller.
  constexpr size_t kMost = size_t{1} << 30;
  uint32_t state = ~crc;
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kMost);
    // It reads only, and says otherwise.
    auto* const data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
    state = crc32_iscsi(data, static_cast<int>(count), state);
    bytes.remove_prefix(count);
  }
  return ~state;
}

}  // namespace emberd
