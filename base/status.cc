#include "base/status.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace emberd {

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}

bool IsWrongPath(int error) {
  constexpr int kWrong[] = {EACCES,  EISDIR, ELOOP, ENAMETOOLONG, ENOENT,
                            ENOTDIR, ENXIO,  EPERM, EROFS};
  return std::find(std::begin(kWrong), std::end(kWrong), error) != std::end(kWrong);
}

}  // namespace emberd
