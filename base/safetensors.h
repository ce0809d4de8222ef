// The header of a .safetensors file (github.com/huggingface/safetensors): 8 bytes with the length
// of what follows, lowest first; a JSON object that says where each tensor lies; spaces. The
// tensors' bytes come behind it, one after another without a hole.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace emberd {

struct SafetensorsTensor {
  std::string name;
  std::string dtype = {};  // "F32", "BF16", "F16", "I32", ...
  std::vector<int64_t> shape = {};
  // Bytes of the file, counted from the end of the header.
  int64_t begin = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata = {};
  std::vector<SafetensorsTensor> tensors = {};  // in the order of their bytes
};

inline constexpr int64_t kSafetensorsPrefix = 8;  // bytes of the length

// Bytes of an element of the type; 0 for a type that the format does not have.
int64_t SafetensorsBytes(absl::string_view dtype);

// The whole header. It has `size` bytes if it needs no more: so a place can be kept for a header
// that is not known yet. Else it has as few as it needs, a multiple of 8.
std::string EncodeSafetensorsHeader(const SafetensorsHeader& header, int64_t size = 0);

// Bytes of the whole header of a file that begins with `prefix` (8 bytes) and has `file_bytes`.
// INVALID_ARGUMENT if no header of such a file begins so.
absl::StatusOr<int64_t> SafetensorsHeaderSize(absl::string_view prefix, int64_t file_bytes);
// Reads what stands behind the first 8 bytes. INVALID_ARGUMENT unless it is such an object, of
// known types, and its tensors take the `data_bytes` behind it without holes and overlaps.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view text,
                                                         int64_t data_bytes);

}  // namespace emberd
