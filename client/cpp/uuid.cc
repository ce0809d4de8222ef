#include "client/cpp/uuid.h"

#include <cstdint>
#include <random>

#include "absl/strings/str_format.h"

namespace emberd::client {

std::string RandomUuid() {
  std::random_device random;
  const auto bits = [&random] { return static_cast<uint32_t>(random()); };
  const uint32_t a = bits(), b = bits(), c = bits(), d = bits();
  // The top bits of the third and fourth group give version and variant.
  return absl::StrFormat("%08x-%04x-%04x-%04x-%04x%08x", a, b >> 16, (b & 0x0fffu) | 0x4000u,
                         (c >> 16 & 0x3fffu) | 0x8000u, c & 0xffffu, d);
}

}  // namespace emberd::client
