#include "server/log/log_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <sys/uio.h>
#include <unistd.h>

#include "absl/base/attributes.h"
#include "base/file_descriptor.h"
#include "server/files/files.h"
#include "server/log/log_format.h"

namespace emberd::log {
namespace {

constexpr char kCannotBeWritten[] = "cannot be written";

// How many of the vectors `count` bytes have gone through; the one they end in is cut.
size_t Advance(absl::Span<iovec> vectors, size_t count) {
  size_t done = 0;
  while (done < vectors.size() && count >= vectors[done].iov_len) count -= vectors[done++].iov_len;
  if (count > 0) {
    vectors[done].iov_base = static_cast<char*>(vectors[done].iov_base) + count;
    vectors[done].iov_len -= count;
  }
  return done;
}

class DiskFile : public LogFile {
 public:
  DiskFile(std::string path, FileDescriptor file)
      : path_(std::move(path)), file_(std::move(file)) {}

  absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) override {
    std::vector<iovec> vectors;
    vectors.reserve(pieces.size());
    for (const absl::Span<const char> piece : pieces) {
      if (!piece.empty()) vectors.push_back({const_cast<char*>(piece.data()), piece.size()});
    }
    for (absl::Span<iovec> left = absl::MakeSpan(vectors); !left.empty();) {
      const int vectors_now = static_cast<int>(std::min<size_t>(left.size(), IOV_MAX));
      const ssize_t count = pwritev(file_.get(), left.data(), vectors_now, offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return files::FileError(errno, path_, kCannotBeWritten);
      offset += count;
      left.remove_prefix(Advance(left, count));
    }
    return absl::OkStatus();
  }

  absl::Status Allocate(int64_t offset, int64_t bytes) override {
    int error;
    do {
      error = posix_fallocate(file_.get(), offset, bytes);
    } while (error == EINTR);
    return error == 0 ? absl::OkStatus() : files::FileError(error, path_, "cannot be enlarged");
  }

  absl::Status Truncate(int64_t bytes) override {
    if (ftruncate(file_.get(), bytes) == 0) return absl::OkStatus();
    return files::FileError(errno, path_, kCannotBeWritten);
  }

  absl::Status Sync() override {
    if (fdatasync(file_.get()) == 0) return absl::OkStatus();
    return files::FileError(errno, path_, kCannotBeWritten);
  }

 private:
  const std::string path_;
  const FileDescriptor file_;
};

class Disk : public LogFiles {
 public:
  absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) override {
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be created");
    return std::make_unique<DiskFile>(path, std::move(file));
  }

  absl::Status Sync(const std::string& path) override {
    const FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be opened");
    return files::SyncFile(file, path);
  }

  absl::Status SyncFolder(const std::string& folder) override { return files::SyncFolder(folder); }

  absl::Status Remove(const std::string& path) override {
    if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
    return files::FileError(errno, path, "cannot be removed");
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return files::FileError(errno, from, "cannot be renamed");
  }

  absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) override {
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) return files::FileError(errno, path, "cannot be opened");
    return std::make_unique<DiskFile>(path, std::move(file));
  }

  std::string BootId() override {
    std::string hex;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), hex);
    std::string id(kBootIdBytes, '\0');
    size_t size = 0;
    auto* const bytes = reinterpret_cast<unsigned char*>(id.data());
    if (OPENSSL_hexstr2buf_ex(bytes, id.size(), &size, hex.c_str(), '-') != 1) {
      id.assign(kBootIdBytes, '\0');
    }
    return id;
  }
};

}  // namespace

LogFiles& DiskLogFiles() {
  static auto* const disk = new Disk;
  return *disk;
}

// Weak: the tests' build has others.
ABSL_ATTRIBUTE_WEAK LogFiles& SystemLogFiles() { return DiskLogFiles(); }

}  // namespace emberd::log
