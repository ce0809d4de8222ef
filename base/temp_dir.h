// A folder that goes away with its files.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_descriptor.h"

namespace emberd {

class TempDir {
 public:
  // In $TMPDIR or /tmp; its name begins with "emberd-".
  static absl::StatusOr<TempDir> Create();

  TempDir(TempDir&& other) noexcept;
  ~TempDir();

  const std::string& path() const { return path_; }
  // Of a file or folder in it.
  std::string Path(absl::string_view name) const;

 private:
  explicit TempDir(std::string path);
  std::string path_;     // empty: moved away
  FileDescriptor lock_;  // systemd-tmpfiles removes nothing old from a folder that is locked
};

}  // namespace emberd
