// Where the sources and the build are, for tests and benchmarks. Their paths stand in one object,
// so that all others are the same in every checkout and a compiler cache finds them.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace emberd {

// `path` is relative: to the root of the sources, or to the folder that this build writes to.
std::string SourcePath(absl::string_view path);
std::string BuildPath(absl::string_view path);

// In a temporary folder that goes away with this process; `name` may hold no folders. Ends the
// process if there is none.
std::string TempPath(absl::string_view name);

}  // namespace emberd
