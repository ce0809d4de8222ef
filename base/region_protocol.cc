#include "base/region_protocol.h"

#include <cstring>

#include <sys/socket.h>

namespace emberd::regions {

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

}  // namespace emberd::regions
