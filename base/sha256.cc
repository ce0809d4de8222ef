#include "base/sha256.h"

#include <openssl/sha.h>

namespace emberd {

std::array<uint8_t, 32> Sha256(const std::string& text) {
  std::array<uint8_t, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

}  // namespace emberd
