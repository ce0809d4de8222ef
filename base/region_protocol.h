// What goes over the socket between RegionServer and SharedArena: one packet each way at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <sys/socket.h>
#include <sys/un.h>

#include "base/file_descriptor.h"

namespace emberd::regions {

// A ticket names who may connect. The first half is shown by the peer, the second by the server, so
// that neither takes somebody else for its other end.
inline constexpr size_t kTicketBytes = 16;

enum Kind : uint32_t {
  kHello = 1,  // with half a ticket: the first packet, and only that
  kTake = 2,   // a new region of `bytes`
  kDrop = 3,   // `region` is not used any more; has no answer
  kLend = 4,   // with the file of `region`, which has `bytes` and is another server's
};
struct Request {
  uint32_t kind = 0;
  uint32_t reserved = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
  uint64_t half_ticket = 0;
};
// To kHello, with the other half. To kTake, with the region's file if `region` is not 0. To kLend:
// `region` is 0 if it is not wanted.
struct Answer {
  uint64_t region = 0;
  uint64_t bytes = 0;  // of the region; where there is none, those that could be had
  uint64_t half_ticket = 0;
};

// The halves of a ticket, of kTicketBytes.
uint64_t FirstHalf(const std::string& ticket);
uint64_t SecondHalf(const std::string& ticket);

// An address in the abstract namespace.
struct AbstractAddress {
  explicit AbstractAddress(const std::string& name);
  bool fits() const { return length > 0; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address = {};
  socklen_t length = 0;  // 0: the name is too long
};

// Both never raise SIGPIPE. `file`: -1 for none. False if the packet could not be sent, at once
// with MSG_DONTWAIT.
template <typename Packet>
bool SendPacket(int socket, const Packet& packet, int flags, int file = -1);
// Nothing if there is none, or it is not one of these, or more than one file came with it. `file`:
// what came with it.
std::optional<Request> ReceiveRequest(int socket, FileDescriptor* file);
std::optional<Answer> ReceiveAnswer(int socket, FileDescriptor* file);

}  // namespace emberd::regions
