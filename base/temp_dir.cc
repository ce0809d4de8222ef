#include "base/temp_dir.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>

#include "absl/strings/str_cat.h"

namespace emberd {

absl::StatusOr<TempDir> TempDir::Create() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  std::string path = (error ? "/tmp" : parent.string()) + "/emberd-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot create a directory"));
  }
  return TempDir(std::move(path));
}

TempDir::TempDir(std::string path)
    : path_(std::move(path)), lock_(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  flock(lock_.get(), LOCK_EX);  // if that fails, the folder is as safe as any other in /tmp
}

TempDir::TempDir(TempDir&& other) noexcept
    : path_(std::exchange(other.path_, "")), lock_(std::move(other.lock_)) {}

TempDir::~TempDir() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::Path(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

}  // namespace emberd
