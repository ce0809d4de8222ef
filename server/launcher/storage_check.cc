#include "server/launcher/storage_check.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace emberd::launcher {
namespace {

absl::Status Unusable(const std::string& field, const std::string& path, const char* what,
                      int error) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", path, " ", what, ": ", std::generic_category().message(error)));
}

// Rights alone do not tell: nobody can write to some file systems.
absl::Status CheckWritable(const std::string& field, const std::string& folder) {
  std::error_code ignored;  // writing says the same
  std::filesystem::create_directories(folder, ignored);
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

}  // namespace

absl::Status CheckStorage(const v1::ClusterConfig& cluster, const std::vector<int>& shards) {
  if (!cluster.has_storage()) return absl::OkStatus();
  const v1::StorageConfig& storage = cluster.storage();
  const std::string field = "storage.directory (--data)";
  RETURN_IF_ERROR(CheckWritable(field, storage.directory()));
  // A cluster that saves nothing by itself may restore from what it cannot change.
  if (storage.durability() != v1::StorageConfig::MEMORY) {
    RETURN_IF_ERROR(CheckWritable("storage.checkpoints", storage.checkpoints()));
  }
  if (storage.durability() != v1::StorageConfig::LOG) return absl::OkStatus();
  for (const int shard : shards) {
    const std::string folder = absl::StrFormat("%s/shard-%04d", storage.directory(), shard);
    struct stat status;
    if (stat(folder.c_str(), &status) != 0 && errno == ENOENT) continue;  // will be made
    RETURN_IF_ERROR(CheckWritable(field, folder));
    RETURN_IF_ERROR(CheckReadable(field, folder + "/log"));
  }
  return absl::OkStatus();
}

absl::Status CheckStorage(const v1::ClusterConfig& cluster) {
  std::vector<int> shards(cluster.shards_size());
  std::iota(shards.begin(), shards.end(), 0);
  return CheckStorage(cluster, shards);
}

}  // namespace emberd::launcher
