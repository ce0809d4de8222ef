// NumPy's .npy files: one array of a plain type.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace emberd::emberctl {

struct Array {
  std::vector<int64_t> shape;
  std::variant<std::vector<int32_t>, std::vector<int64_t>, std::vector<float>> values;
};

// Reads the content of a file of format version 1, 2 or 3: little-endian int32, int64 or float32 in
// C order, with 0 to 8 dimensions. INVALID_ARGUMENT for anything else.
absl::StatusOr<Array> ParseNpy(absl::string_view content);

}  // namespace emberd::emberctl
