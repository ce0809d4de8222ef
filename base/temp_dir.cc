#include "base/temp_dir.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include <stdlib.h>

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

TempDir::TempDir(std::string path) : path_(std::move(path)) {}

TempDir::TempDir(TempDir&& other) noexcept : path_(std::exchange(other.path_, "")) {}

TempDir& TempDir::operator=(TempDir&& other) noexcept {
  std::swap(path_, other.path_);
  return *this;
}

TempDir::~TempDir() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::Path(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

}  // namespace emberd
