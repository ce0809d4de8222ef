#include "server/security/renewable_files.h"

#include <cerrno>
#include <string>

#include <fcntl.h>
#include <grpc/grpc.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace emberd::security {
namespace {

constexpr unsigned kWatchSeconds = 1;

// A file that nobody else can open by name.
absl::StatusOr<FileDescriptor> MemoryFile(absl::string_view content) {
  FileDescriptor file(memfd_create("emberd-credentials", MFD_CLOEXEC));
  while (file.get() >= 0 && !content.empty()) {
    const ssize_t size = write(file.get(), content.data(), content.size());
    if (size < 0 && errno != EINTR) break;
    if (size > 0) content.remove_prefix(static_cast<size_t>(size));
  }
  if (file.get() < 0 || !content.empty()) {
    return absl::ErrnoToStatus(errno, "cannot hold certificates in memory");
  }
  return file;
}

// Key and certificate in one file, so that they always belong together.
std::string Identity(const config::PemFiles& files) {
  return absl::StrCat(files.certificate, "\n", files.key);
}

std::string PathOf(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

absl::Status Replace(int fd, absl::string_view content) {
  ASSIGN_OR_RETURN(const FileDescriptor file, MemoryFile(content));
  if (dup3(file.get(), fd, O_CLOEXEC) < 0) {
    return absl::ErrnoToStatus(errno, "cannot replace certificates in memory");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RenewableFiles>> RenewableFiles::Create(
    const config::PemFiles& files) {
  ASSIGN_OR_RETURN(const FileDescriptor identity, MemoryFile(Identity(files)));
  ASSIGN_OR_RETURN(const FileDescriptor authorities, MemoryFile(files.ca));
  return std::unique_ptr<RenewableFiles>(new RenewableFiles(
      fcntl(identity.get(), F_DUPFD_CLOEXEC, 0), fcntl(authorities.get(), F_DUPFD_CLOEXEC, 0)));
}

RenewableFiles::RenewableFiles(int identity_fd, int authorities_fd)
    : identity_fd_(identity_fd), authorities_fd_(authorities_fd) {
  grpc_init();
  provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      PathOf(identity_fd), PathOf(identity_fd), PathOf(authorities_fd), kWatchSeconds);
}

RenewableFiles::~RenewableFiles() {
  provider_ = nullptr;
  grpc_shutdown();
}

absl::Status RenewableFiles::Set(const config::PemFiles& files) {
  RETURN_IF_ERROR(Replace(authorities_fd_, files.ca));
  return Replace(identity_fd_, Identity(files));
}

}  // namespace emberd::security
