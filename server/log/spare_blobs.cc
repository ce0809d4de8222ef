#include "server/log/spare_blobs.h"

#include <filesystem>
#include <system_error>

#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/log/log_format.h"

namespace emberd::server {

bool SpareBlobs::HasRoom(int64_t bytes) const {
  for (const Spare& spare : spares_) bytes += spare.bytes;
  std::error_code error;
  const std::filesystem::space_info disk = std::filesystem::space(folder_, error);
  return bytes <= most_bytes_ && !error && static_cast<uint64_t>(bytes) <= disk.available;
}

void SpareBlobs::Find() {
  const absl::StatusOr<LogFolder> found = ListLog(folder_);
  if (!found.ok()) return;
  MutexLock lock(&mutex_);
  for (const uint64_t segment : found->spares) {
    const std::string path = PathIn(folder_, SpareName(segment));
    const int64_t bytes = LogFileBytes(path);
    if (HasRoom(bytes)) {
      spares_.push_back({segment, bytes});
    } else {
      files_.Remove(path).IgnoreError();
    }
  }
}

absl::Status SpareBlobs::Keep(uint64_t segment) {
  const std::string path = PathIn(folder_, BlobsName(segment));
  const int64_t bytes = LogFileBytes(path);
  MutexLock lock(&mutex_);
  if (bytes == 0 || !HasRoom(bytes)) return files_.Remove(path);
  RETURN_IF_ERROR(files_.Rename(path, PathIn(folder_, SpareName(segment))));
  spares_.push_back({segment, bytes});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LogFile>> SpareBlobs::Take(uint64_t segment) {
  const std::string path = PathIn(folder_, BlobsName(segment));
  MutexLock lock(&mutex_);
  while (!spares_.empty()) {
    const std::string spare = PathIn(folder_, SpareName(spares_.back().segment));
    spares_.pop_back();
    if (files_.Rename(spare, path).ok()) return files_.Open(path);
  }
  return files_.Create(path);
}

bool SpareBlobs::Clear() {
  MutexLock lock(&mutex_);
  const bool any = !spares_.empty();
  for (const Spare& spare : spares_) {
    files_.Remove(PathIn(folder_, SpareName(spare.segment))).IgnoreError();
  }
  spares_.clear();
  return any;
}

}  // namespace emberd::server
