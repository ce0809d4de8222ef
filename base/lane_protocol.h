// What goes over a lane: a Unix socket between two processes of one machine, over which one small
// call at a time is made. One packet is a request, one packet its answer. See LaneServer, LanePool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace emberd::lanes {

// Of one packet, all in all.
inline constexpr size_t kMaxPacketBytes = size_t{64} << 10;

struct Request {
  uint64_t number = 0;                                 // its answer has the same
  uint32_t method = 0;                                 // as both ends have agreed
  absl::Duration patience = absl::InfiniteDuration();  // the answer is of no use later
  absl::string_view authorization = {};                // as in the header of a gRPC call
  absl::string_view trace = {};                        // "traceparent"; empty: none
  absl::string_view body = {};
};

struct Answer {
  uint64_t number = 0;
  // The call is not for a lane: it has to be made in another way, as if this had not been asked.
  bool elsewhere = false;
  absl::Status status = absl::OkStatus();
  absl::string_view body = {};  // only with an OK status
};

// A packet as two pieces: what stands before the body, and the body. False if it is too long.
bool EncodeHead(const Request& request, std::string* head);
// A message that is too long is cut; false if the body is.
bool EncodeHead(const Answer& answer, std::string* head);

// Nothing if the packet is none of these. Views are into `packet`.
std::optional<Request> DecodeRequest(absl::string_view packet);
std::optional<Answer> DecodeAnswer(absl::string_view packet);

// Sends a packet without waiting, and without SIGPIPE. False if it cannot be sent at once.
bool SendPacket(int socket, absl::string_view head, absl::string_view body);

}  // namespace emberd::lanes
