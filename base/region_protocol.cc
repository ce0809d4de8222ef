#include "base/region_protocol.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

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

namespace regions {

template <typename Packet>
bool SendPacket(int socket, const Packet& packet, int flags, int file) {
  iovec bytes = {const_cast<Packet*>(&packet), sizeof(packet)};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof(file));
  }
  return sendmsg(socket, &message, flags | MSG_NOSIGNAL) == sizeof(packet);
}
template bool SendPacket(int socket, const Request& packet, int flags, int file);
template bool SendPacket(int socket, const Answer& packet, int flags, int file);

namespace {

// A packet of exactly this type, and the file that came with it.
template <typename Packet>
std::optional<Packet> ReceivePacket(int socket, int flags, FileDescriptor* file) {
  Packet packet;
  iovec bytes = {&packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  // Not the padding behind it, where a second file would find room. The kernel closes those that
  // have none, and says so.
  message.msg_controllen = CMSG_LEN(sizeof(int));
  const ssize_t size = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (size > 0 && header != nullptr && header->cmsg_level == SOL_SOCKET &&
      header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    *file = FileDescriptor(received);
  }
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (size != sizeof(packet) || cut) return std::nullopt;
  return packet;
}

}  // namespace

std::optional<Request> ReceiveRequest(int socket, FileDescriptor* file) {
  return ReceivePacket<Request>(socket, MSG_DONTWAIT, file);
}

std::optional<Answer> ReceiveAnswer(int socket, FileDescriptor* file) {
  return ReceivePacket<Answer>(socket, 0, file);
}

}  // namespace regions
}  // namespace emberd
