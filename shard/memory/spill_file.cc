#include "shard/memory/spill_file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"

namespace emberd::shard {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;

}  // namespace

absl::StatusOr<SpillFile> SpillFile::Create(const std::string& folder) {
  std::string path = folder + "/spill-XXXXXX";
  FileDescriptor file(mkostemp(path.data(), O_CLOEXEC));
  if (file.get() < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "eviction.spill_folder: no file can be made in ", folder, ": ", strerror(errno)));
  }
  unlink(path.c_str());
  return SpillFile(std::move(path), std::move(file));
}

absl::Status SpillFile::Write(absl::Span<const char> bytes) {
  if (static_cast<int64_t>(bytes.size()) > limit_ - bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rows cannot be spilled: of eviction.spill_bytes, ", limit_,
                     " bytes are left, and at least ", bytes_ + bytes.size(), " are needed"));
  }
  while (!bytes.empty()) {
    // In pieces, so that the checksum is taken of what is in the cache.
    const absl::Span<const char> piece = bytes.subspan(0, kPieceBytes);
    const ssize_t written = pwrite(file_.get(), piece.data(), piece.size(), bytes_);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("rows cannot be spilled to ", path_, ": ",
                       written < 0 ? strerror(errno) : "nothing more can be written"));
    }
    crc_ = ExtendCrc32c(crc_, piece.subspan(0, written));
    bytes_ += written;
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

void SpillFile::Rewind() {
  read_ = 0;
  read_crc_ = 0;
}

absl::Status SpillFile::Read(absl::Span<char> bytes) {
  while (!bytes.empty()) {
    const absl::Span<char> piece = bytes.subspan(0, kPieceBytes);
    const ssize_t got = pread(file_.get(), piece.data(), piece.size(), read_);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return absl::DataLossError(absl::StrCat(
          "rows spilled to ", path_, " cannot be read: ",
          got < 0 ? strerror(errno)
                  : absl::StrCat("the file ends after ", read_, " of ", bytes_, " bytes")));
    }
    read_crc_ = ExtendCrc32c(read_crc_, piece.subspan(0, got));
    read_ += got;
    bytes.remove_prefix(got);
  }
  return absl::OkStatus();
}

absl::Status SpillFile::CheckRead() const {
  if (read_ == bytes_ && read_crc_ == crc_) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("rows spilled to ", path_, " are damaged: their checksum has changed"));
}

}  // namespace emberd::shard
