// What to tell somebody who wrote a name that is not known, and how ids are shown.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace emberd {

// An id as it is shown everywhere: 16 hex digits.
inline std::string HexId(uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); }

// The name that `text` was probably meant to be: the one with the fewest letters changed, whatever
// their case, if it is near at all; else empty.
std::string NearestName(absl::string_view text, const std::vector<std::string>& names);

// For the end of an error: "did you mean "users"? Known tables: items, users", or without the
// question if no name is near. Of very many names, the first.
std::string KnownNames(absl::string_view plural, absl::string_view text,
                       const std::vector<std::string>& names);

}  // namespace emberd
