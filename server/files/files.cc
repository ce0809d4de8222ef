#include "server/files/files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/crc32c.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::files {
namespace {

namespace fs = std::filesystem;

// File systems take 255 bytes; the rest is for what stands around the name.
constexpr size_t kLongestName = 180;

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

absl::Status FileError(int error, absl::string_view path, absl::string_view what) {
  const std::string text = absl::StrCat(path, ": ", what);
  const absl::Status status = absl::ErrnoToStatus(error, text);
  // A limit of this process, or of the file system.
  if (error == EFBIG) return absl::ResourceExhaustedError(status.message());
  return absl::IsUnknown(status) ? absl::FailedPreconditionError(status.message()) : status;
}

absl::Status DamagedFile(absl::string_view path, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(path, ": ", what));
}

bool IsGone(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsDataLoss(status);
}

absl::StatusOr<bool> IsThere(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) return true;
  const int error = errno;
  if (error == ENOENT || error == ENOTDIR) return false;
  RETURN_IF_ERROR(CheckLinks(path));
  return FileError(error, path, "cannot be looked at");
}

std::string EscapeFileName(absl::string_view name) {
  std::string escaped;
  for (const char c : name) {
    const bool keep =
        absl::ascii_isalnum(c) || c == '_' || c == '-' || (c == '.' && !escaped.empty());
    if (keep) {
      escaped.push_back(c);
    } else {
      absl::StrAppendFormat(&escaped, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  if (escaped.size() <= kLongestName) return escaped;
  // No other name has a ~.
  return absl::StrCat(escaped.substr(0, kLongestName - 33), "~", Sha256Hex(name).substr(0, 32));
}

std::string PathIn(absl::string_view folder, absl::string_view name) {
  return absl::StrCat(folder, "/", name);
}

absl::Status CheckFileName(absl::string_view name) {
  if (!name.empty() && name[0] != '.' && !absl::StrContains(name, '/') &&
      !absl::StrContains(name, '\0')) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not the name of a file in the checkpoint's folder"));
}

absl::StatusOr<FileDescriptor> OpenNamedFile(const std::string& path, int64_t bytes) {
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && (errno == ENOENT || errno == ENOTDIR)) {
    return DamagedFile(path, "is missing, though the manifest lists it");
  }
  if (file.get() < 0) return FileError(errno, path, "cannot be opened");
  struct stat status;
  if (fstat(file.get(), &status) != 0) return FileError(errno, path, "cannot be read");
  if (!S_ISREG(status.st_mode)) return DamagedFile(path, "is not a file");
  if (status.st_size != bytes) {
    return DamagedFile(path, absl::StrCat("has ", status.st_size, " bytes, but the manifest says ",
                                          bytes, ": it was cut off or replaced"));
  }
  return file;
}

absl::Status ReadAt(const FileDescriptor& file, absl::string_view path, int64_t offset, char* bytes,
                    int64_t size) {
  while (size > 0) {
    const ssize_t count = pread(file.get(), bytes, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, path, absl::StrCat("cannot be read at byte ", offset));
    if (count == 0)
      return DamagedFile(path, absl::StrCat("ends at byte ", offset, ": it was cut off"));
    bytes += count;
    offset += count;
    size -= count;
  }
  return absl::OkStatus();
}

absl::Status WriteAt(const FileDescriptor& file, absl::string_view path, int64_t offset,
                     absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = pwrite(file.get(), bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, path, "cannot be written");
    offset += count;
    bytes.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status SyncFile(const FileDescriptor& file, absl::string_view path) {
  if (fsync(file.get()) == 0) return absl::OkStatus();
  return FileError(errno, path, "cannot be written");
}

absl::Status SyncFolder(const std::string& folder) {
  const FileDescriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() < 0) return FileError(errno, folder, "cannot be opened");
  return SyncFile(descriptor, folder);
}

absl::Status WriteFileWhole(const std::string& folder, const std::string& name,
                            absl::string_view bytes) {
  const std::string path = PathIn(folder, name);
  const std::string temporary = absl::StrCat(path, ".tmp");
  const auto write = [&]() -> absl::Status {
    const FileDescriptor file(
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.get() < 0) return FileError(errno, path, "cannot be written");
    RETURN_IF_ERROR(WriteAt(file, path, 0, bytes));
    RETURN_IF_ERROR(SyncFile(file, path));
    if (rename(temporary.c_str(), path.c_str()) == 0) return SyncFolder(folder);
    return FileError(errno, path, "cannot be written");
  };
  const absl::Status status = write();
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

absl::StatusOr<std::string> ReadFileWhole(const std::string& path) {
  return ReadFileBegin(path, std::numeric_limits<int64_t>::max());
}

absl::StatusOr<std::string> ReadFileBegin(const std::string& path, int64_t most) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return FileError(errno, path, "cannot be opened");
  struct stat status;
  if (fstat(file.get(), &status) != 0) return FileError(errno, path, "cannot be read");
  if (!S_ISREG(status.st_mode)) return DamagedFile(path, "is not a file");
  std::string bytes(std::min<int64_t>(most, status.st_size), '\0');
  RETURN_IF_ERROR(ReadAt(file, path, 0, bytes.data(), static_cast<int64_t>(bytes.size())));
  return bytes;
}

absl::StatusOr<v1::CheckpointFile> WriteListedFile(const std::string& folder,
                                                   const std::string& name,
                                                   absl::string_view bytes) {
  RETURN_IF_ERROR(WriteFileWhole(folder, name, bytes));
  v1::CheckpointFile file;
  file.set_path(name);
  file.set_bytes(static_cast<int64_t>(bytes.size()));
  file.set_data_crc32c(ExtendCrc32c(0, bytes));
  return file;
}

absl::StatusOr<std::string> ReadListedFile(const std::string& folder,
                                           const v1::CheckpointFile& file) {
  const std::string path = PathIn(folder, file.path());
  ASSIGN_OR_RETURN(const FileDescriptor descriptor, OpenNamedFile(path, file.bytes()));
  std::string bytes(file.bytes(), '\0');
  RETURN_IF_ERROR(ReadAt(descriptor, path, 0, bytes.data(), file.bytes()));
  if (ExtendCrc32c(0, bytes) == file.data_crc32c()) return bytes;
  return DamagedFile(path, "its checksum is not that of the manifest: it was changed");
}

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

absl::StatusOr<FolderLock> FolderLock::Take(const std::string& folder, absl::Duration patience) {
  const std::string path = PathIn(folder, ".lock");
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (file.get() < 0) return FileError(errno, path, "cannot be opened");
  const absl::Time give_up = SteadyNow() + patience;
  while (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return FileError(errno, path, "cannot be locked");
    if (SteadyNow() >= give_up) {
      return absl::UnavailableError(absl::StrCat(
          path, ": another process has kept it locked for ", absl::FormatDuration(patience),
          "; if it was stopped (SIGSTOP) or hangs, let it go on or kill it, and try again"));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return FolderLock(std::move(file));
}

}  // namespace emberd::files
