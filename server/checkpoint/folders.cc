#include "server/checkpoint/folders.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "server/checkpoint/files.h"

namespace emberd::server {

namespace fs = std::filesystem;

namespace {

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder, bool folders) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  while (!error && entry != fs::directory_iterator()) {
    std::error_code unknown;
    const bool is_folder = entry->is_directory(unknown);
    // It may have gone meanwhile, and a link to itself is no folder.
    if (unknown && unknown.value() != ENOENT && unknown.value() != ELOOP) {
      return FileError(unknown.value(), entry->path().string(), "cannot be looked at");
    }
    if (is_folder == folders) names.push_back(entry->path().filename().string());
    entry.increment(error);
  }
  if (error) RETURN_IF_ERROR(CheckLinks(folder));
  if (error && error.value() != ENOENT) return FileError(error.value(), folder, "cannot be read");
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> FoldersIn(const std::string& folder) {
  return NamesIn(folder, true);
}

absl::StatusOr<std::vector<std::string>> FilesIn(const std::string& folder) {
  return NamesIn(folder, false);
}

absl::Status CheckLinks(const std::string& path) {
  fs::path way;
  for (const fs::path& step : fs::path(path)) {
    way /= step;
    std::error_code error;
    if (!fs::is_symlink(way, error) || fs::exists(way, error)) continue;
    if (error && error.value() != ELOOP) continue;  // whoever opens it is told
    const std::string target = fs::read_symlink(way, error).string();
    return absl::FailedPreconditionError(
        absl::StrCat(way.string(), ": is a link to ", target,
                     ", which does not exist or leads back to it; mount the disk that it stands "
                     "for, or correct the link"));
  }
  return absl::OkStatus();
}

int64_t BytesIn(const std::string& folder) {
  int64_t bytes = 0;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  while (!error && entry != fs::directory_iterator()) {
    std::error_code gone;
    const auto size = entry->file_size(gone);
    if (!gone) bytes += static_cast<int64_t>(size);
    entry.increment(error);
  }
  return bytes;
}

absl::Status RemoveFolder(const std::string& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (!error || error.value() == ENOENT) return absl::OkStatus();
  return FileError(error.value(), folder, "cannot be removed");
}

absl::Status MakeFolders(const std::string& folder) {
  const std::string parent = fs::path(folder).parent_path().string();
  const auto make = [&] { return mkdir(folder.c_str(), 0755) == 0 ? 0 : errno; };
  int error = make();
  if (error == ENOENT && !parent.empty()) {
    RETURN_IF_ERROR(CheckLinks(folder));
    RETURN_IF_ERROR(MakeFolders(parent));
    error = make();
  }
  if (error == 0) return SyncFolder(parent.empty() ? "." : parent);
  if (error == EEXIST) {
    struct stat status;
    const bool known = stat(folder.c_str(), &status) == 0;
    if (known && S_ISDIR(status.st_mode)) return absl::OkStatus();
    error = known ? ENOTDIR : errno;
  }
  RETURN_IF_ERROR(CheckLinks(folder));
  return FileError(error, folder, "cannot be created");
}

std::string RandomName(const std::string& parent, absl::string_view prefix) {
  std::random_device random;
  return PathIn(parent, absl::StrFormat("%s%08x%08x", prefix, random(), random()));
}

absl::StatusOr<std::string> MakeFolder(const std::string& parent, absl::string_view prefix) {
  std::string folder = RandomName(parent, prefix);
  if (mkdir(folder.c_str(), 0755) == 0) return folder;
  return FileError(errno, folder, "cannot be created");
}

absl::Status TouchFolder(const std::string& folder) {
  if (utimensat(AT_FDCWD, folder.c_str(), nullptr, 0) == 0) return absl::OkStatus();
  return FileError(errno, folder, "cannot be changed");
}

absl::StatusOr<int64_t> TouchedAt(const std::string& folder) {
  // Opening makes a network file system look again.
  const FileDescriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat status;
  if (descriptor.get() < 0 || fstat(descriptor.get(), &status) != 0) {
    return FileError(errno, folder, "cannot be opened");
  }
  return status.st_mtim.tv_sec;
}

absl::StatusOr<FolderLock> FolderLock::Take(const std::string& folder) {
  const std::string path = PathIn(folder, ".lock");
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (file.get() < 0) return FileError(errno, path, "cannot be opened");
  while (flock(file.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return FileError(errno, path, "cannot be locked");
  }
  return FolderLock(std::move(file));
}

}  // namespace emberd::server
