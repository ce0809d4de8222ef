// SHA-256, for names, fingerprints and tokens that must be equal on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

struct evp_md_ctx_st;  // of OpenSSL

namespace emberd {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest Sha256(absl::string_view bytes);
// In 64 lower-case hexadecimal digits.
std::string Sha256Hex(absl::string_view bytes);
// Its first 8 bytes as a number, the first byte highest.
uint64_t Sha256Prefix(absl::string_view bytes);

// SHA-256 of bytes that come piece by piece.
class Sha256Stream {
 public:
  Sha256Stream();
  void Add(absl::string_view bytes);
  // Of all that was added. Ends the stream: nothing may be called after it.
  Sha256Digest Digest();
  std::string Hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

}  // namespace emberd
