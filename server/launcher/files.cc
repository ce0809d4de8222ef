#include "server/launcher/files.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/launcher/shard_count.h"

namespace emberd::launcher {

absl::Status WriteFileAtomically(const std::string& path, const std::string& content) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream file(temporary, std::ios::binary);
  bool like_before = true;
  if (struct stat old; file && stat(path.c_str(), &old) == 0) {
    // The owner stays where this process may give files away, the mode always.
    static_cast<void>(chown(temporary.c_str(), old.st_uid, old.st_gid) == 0);
    like_before = chmod(temporary.c_str(), old.st_mode & 0777) == 0;
  }
  file << content;
  // Before it takes the place of the old one, which a loss of power might otherwise leave empty.
  const auto on_disk = [&] {
    const FileDescriptor written(open(temporary.c_str(), O_RDONLY | O_CLOEXEC));
    return written.get() >= 0 && fsync(written.get()) == 0;
  };
  if (like_before && file.flush() && on_disk() &&
      std::rename(temporary.c_str(), path.c_str()) == 0) {
    return absl::OkStatus();
  }
  const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be written"));
  unlink(temporary.c_str());
  return status;
}

absl::Status WriteReadyFile(const std::string& path, const ReadyInfo& info) {
  return WriteFileAtomically(
      path, absl::StrCat("grpc=", info.grpc, "\nhttp=", info.http, "\npid=", info.pid, "\n"));
}

absl::StatusOr<ReadyInfo> ReadReadyFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string content, files::ReadFileWhole(path));
  ReadyInfo info;
  for (absl::string_view line : absl::StrSplit(content, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (entry.first == "grpc") info.grpc = std::string(entry.second);
    if (entry.first == "http") info.http = std::string(entry.second);
    if (entry.first == "pid" && !absl::SimpleAtoi(entry.second, &info.pid)) info.pid = 0;
  }
  if (!info.grpc.empty() && info.pid > 0) return info;
  return absl::InvalidArgumentError(absl::StrCat(path, ": is not a ready file"));
}

namespace {

absl::Status Unusable(const std::string& field, const std::string& path, const char* what,
                      int error) {
  const std::string text =
      absl::StrCat(field, ": ", path, " ", what, ": ", std::generic_category().message(error));
  return IsWrongPath(error) ? absl::InvalidArgumentError(text) : absl::UnavailableError(text);
}

// Rights alone do not tell: nobody can write to some file systems.
absl::Status CheckWritable(const std::string& field, const std::string& folder) {
  files::MakeFolders(folder).IgnoreError();  // writing says the same
  std::string path = folder + "/.emberd-can-write-XXXXXX";
  const FileDescriptor file(mkostemp(path.data(), O_CLOEXEC));
  if (file.get() >= 0) {
    unlink(path.c_str());
    return absl::OkStatus();
  }
  if (errno == ENOSPC || errno == EDQUOT) return absl::OkStatus();
  return Unusable(field, folder,
                  "is no folder that emberd can write to; name another one, or let emberd's user "
                  "write there",
                  errno);
}

// The bytes of the files are for the shard to judge.
absl::Status CheckReadable(const std::string& field, const std::string& folder) {
  constexpr char kWhat[] =
      "cannot be read, but is needed for what a shard's log holds; let emberd's user read it, or "
      "bring it back as it was";
  std::error_code error;
  std::filesystem::directory_iterator files(folder, error);
  if (error == std::errc::no_such_file_or_directory) return absl::OkStatus();
  for (; !error && files != std::filesystem::directory_iterator(); files.increment(error)) {
    const std::string path = files->path().string();
    const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    // What is gone was removed by a process that is ending.
    if (file.get() < 0 && errno != ENOENT) return Unusable(field, path, kWhat, errno);
  }
  return error ? Unusable(field, folder, kWhat, error.value()) : absl::OkStatus();
}

// CHECKPOINT: changes that only a log has would be missing, and come back with the next LOG.
absl::Status CheckHoldsNoLog(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "storage.durability (--durability): CHECKPOINT would leave out what ", path,
      " holds; write LOG (--durability log; in Python durability=\"log\"), or move the "
      "folders shard-NNNN away to go on from checkpoints"));
}

}  // namespace

absl::Status CheckStorage(const v1::ClusterConfig& cluster, std::optional<int> shard) {
  if (!cluster.has_storage()) return absl::OkStatus();
  const v1::StorageConfig& storage = cluster.storage();
  const std::string field = "storage.directory (--data)";
  RETURN_IF_ERROR(CheckWritable(field, storage.directory()));
  // A cluster that saves nothing by itself may restore from what it cannot change, and serve what
  // another one with logs saves.
  if (storage.durability() == v1::StorageConfig::MEMORY) return absl::OkStatus();
  RETURN_IF_ERROR(CheckWritable("storage.checkpoints", storage.checkpoints()));
  const bool logs = storage.durability() == v1::StorageConfig::LOG;
  const std::string moving = files::PathIn(storage.directory(), kMoving);
  if (!logs) RETURN_IF_ERROR(CheckHoldsNoLog(moving));
  if (shard.has_value() && access(moving.c_str(), F_OK) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(moving, ": a move to another number of shards has not ended, and logs are ",
                     "missing; `emberd up` with this folder ends it"));
  }
  for (int i = 0; i < cluster.shards_size(); ++i) {
    if (i != shard.value_or(i)) continue;
    const std::string folder = absl::StrFormat("%s/shard-%04d", storage.directory(), i);
    if (!logs) {
      RETURN_IF_ERROR(CheckHoldsNoLog(folder + "/log"));
      continue;
    }
    struct stat status;
    if (stat(folder.c_str(), &status) != 0 && errno == ENOENT) continue;  // will be made
    RETURN_IF_ERROR(CheckWritable(field, folder));
    RETURN_IF_ERROR(CheckReadable(field, folder + "/log"));
  }
  return absl::OkStatus();
}

}  // namespace emberd::launcher
