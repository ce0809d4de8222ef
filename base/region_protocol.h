// What goes over the socket between RegionServer and SharedArena, once LocalServer has let it in:
// one packet each way at a time.
#pragma once

#include <cstdint>
#include <optional>

#include "base/file_descriptor.h"

namespace emberd::regions {

enum Kind : uint32_t {
  kTake = 1,  // a new region of `bytes`
  kDrop = 2,  // `region` is not used any more; has no answer
  kLend = 3,  // with the file of `region`, which has `bytes` and is another server's
};
struct Request {
  uint32_t kind = 0;
  uint32_t reserved = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
};
// To kTake, with the region's file if `region` is not 0. To kLend: `region` is 0 if it is not
// wanted.
struct Answer {
  uint64_t region = 0;
  uint64_t bytes = 0;  // of the region; where there is none, those that could be had
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
