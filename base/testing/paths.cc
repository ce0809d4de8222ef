#include "base/testing/paths.h"

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"

namespace emberd {

std::string SourcePath(absl::string_view path) { return absl::StrCat(EMBERD_SOURCE_DIR "/", path); }

std::string BuildPath(absl::string_view path) { return absl::StrCat(EMBERD_BINARY_DIR "/", path); }

std::string TempPath(absl::string_view name) {
  static const TempDir folder = TempDir::Create().value();
  return folder.Path(name);
}

}  // namespace emberd
