#include "base/shared_region.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status NoMemory(absl::string_view what, size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot ", what, " ", bytes, " bytes of shared memory: ", strerror(errno)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Create(const char* name, size_t bytes) {
  FileDescriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return NoMemory("create", bytes);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return NoMemory("make", bytes);
  if (fcntl(file.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) return NoMemory("seal", bytes);
  return MapFile(std::move(file), bytes);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Map(FileDescriptor file, size_t bytes) {
  // First: until it is sealed, the size could be another one in a moment.
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return absl::InvalidArgumentError("shared memory is not sealed: its size could change");
  }
  struct stat found = {};
  if (fstat(file.get(), &found) != 0 || found.st_size != static_cast<off_t>(bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared memory has ", found.st_size, " bytes; it must have ", bytes));
  }
  return MapFile(std::move(file), bytes);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::MapFile(FileDescriptor file,
                                                                    size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return NoMemory("map", bytes);
  // Advice only: most kernels give huge pages to such memory only where they are told to.
  madvise(data, bytes, MADV_HUGEPAGE);
  return std::shared_ptr<SharedRegion>(
      new SharedRegion(std::move(file), static_cast<char*>(data), bytes));
}

bool SharedRegion::KeepFromOthers(uint64_t offset, uint64_t bytes) {
  return mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_.get(),
              static_cast<off_t>(offset)) != MAP_FAILED;
}

SharedRegion::~SharedRegion() { munmap(data_, size_); }

}  // namespace emberd
