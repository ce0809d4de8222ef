#include "base/sha256.h"

#include <cstdlib>

#include <openssl/evp.h>

#include "absl/strings/escaping.h"

namespace emberd {
namespace {

// OpenSSL fails here only without memory.
void Check(int result) {
  if (result != 1) std::abort();
}

std::string ToHex(const Sha256Digest& digest) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

}  // namespace

Sha256Stream::Sha256Stream() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  Check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256Stream::Add(absl::string_view bytes) {
  Check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}

Sha256Digest Sha256Stream::Digest() {
  Sha256Digest digest;
  Check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  return digest;
}

std::string Sha256Stream::Hex() { return ToHex(Digest()); }

Sha256Digest Sha256(absl::string_view bytes) {
  Sha256Stream stream;
  stream.Add(bytes);
  return stream.Digest();
}

std::string Sha256Hex(absl::string_view bytes) { return ToHex(Sha256(bytes)); }

uint64_t Sha256Prefix(absl::string_view bytes) {
  const Sha256Digest digest = Sha256(bytes);
  uint64_t prefix = 0;
  for (int i = 0; i < 8; ++i) prefix = prefix << 8 | digest[i];
  return prefix;
}

}  // namespace emberd
