#include "base/lane_protocol.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <sys/socket.h>
#include <sys/uio.h>

namespace emberd::lanes {
namespace {

// Both ends are on one machine, so numbers travel as they lie in memory.
struct RequestHead {
  uint64_t number = 0;
  int64_t patience_ns = 0;
  uint32_t method = 0;
  uint32_t authorization_bytes = 0;
  uint32_t trace_bytes = 0;
  uint32_t body_bytes = 0;
};
struct AnswerHead {
  uint64_t number = 0;
  uint32_t elsewhere = 0;
  uint32_t code = 0;
  uint32_t message_bytes = 0;
  uint32_t body_bytes = 0;
};

constexpr uint32_t kLastCode = static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
// Errors say no more than a few lines; this much fits in any packet.
constexpr size_t kMaxMessageBytes = kMaxPacketBytes / 2;

template <typename Head>
bool ReadHead(absl::string_view* packet, Head* head) {
  if (packet->size() < sizeof(Head) || packet->size() > kMaxPacketBytes) return false;
  std::memcpy(head, packet->data(), sizeof(Head));
  packet->remove_prefix(sizeof(Head));
  return true;
}

bool Take(absl::string_view* rest, size_t bytes, absl::string_view* piece) {
  if (bytes > rest->size()) return false;
  *piece = rest->substr(0, bytes);
  rest->remove_prefix(bytes);
  return true;
}

template <typename Head>
void Begin(const Head& head, std::string* bytes) {
  bytes->assign(reinterpret_cast<const char*>(&head), sizeof(head));
}

}  // namespace

bool EncodeHead(const Request& request, std::string* head) {
  // So that no sum below overflows.
  for (const absl::string_view piece : {request.authorization, request.trace, request.body}) {
    if (piece.size() > kMaxPacketBytes) return false;
  }
  RequestHead fields;
  fields.number = request.number;
  fields.patience_ns = absl::ToInt64Nanoseconds(request.patience);
  fields.method = request.method;
  fields.authorization_bytes = static_cast<uint32_t>(request.authorization.size());
  fields.trace_bytes = static_cast<uint32_t>(request.trace.size());
  fields.body_bytes = static_cast<uint32_t>(request.body.size());
  Begin(fields, head);
  head->append(request.authorization.data(), request.authorization.size());
  head->append(request.trace.data(), request.trace.size());
  return head->size() + request.body.size() <= kMaxPacketBytes;
}

bool EncodeHead(const Answer& answer, std::string* head) {
  const absl::string_view message = answer.status.message().substr(0, kMaxMessageBytes);
  AnswerHead fields;
  fields.number = answer.number;
  fields.elsewhere = answer.elsewhere ? 1 : 0;
  fields.code = static_cast<uint32_t>(answer.status.code());
  fields.message_bytes = static_cast<uint32_t>(message.size());
  fields.body_bytes = static_cast<uint32_t>(std::min(answer.body.size(), kMaxPacketBytes));
  Begin(fields, head);
  head->append(message.data(), message.size());
  return answer.body.size() <= kMaxPacketBytes - head->size();
}

std::optional<Request> DecodeRequest(absl::string_view packet) {
  RequestHead head;
  Request request;
  if (!ReadHead(&packet, &head) ||
      !Take(&packet, head.authorization_bytes, &request.authorization) ||
      !Take(&packet, head.trace_bytes, &request.trace) ||
      !Take(&packet, head.body_bytes, &request.body) || !packet.empty()) {
    return std::nullopt;
  }
  request.number = head.number;
  request.method = head.method;
  request.patience = head.patience_ns == std::numeric_limits<int64_t>::max()
                         ? absl::InfiniteDuration()
                         : absl::Nanoseconds(head.patience_ns);
  return request;
}

std::optional<Answer> DecodeAnswer(absl::string_view packet) {
  AnswerHead head;
  Answer answer;
  absl::string_view message;
  if (!ReadHead(&packet, &head) || head.elsewhere > 1 || head.code > kLastCode ||
      !Take(&packet, head.message_bytes, &message) ||
      !Take(&packet, head.body_bytes, &answer.body) || !packet.empty()) {
    return std::nullopt;
  }
  // Of an OK status there is nothing to say, and an error has no answer.
  if (head.code == 0 ? !message.empty() : !answer.body.empty()) return std::nullopt;
  answer.number = head.number;
  answer.elsewhere = head.elsewhere == 1;
  answer.status = absl::Status(static_cast<absl::StatusCode>(head.code), message);
  return answer;
}

bool SendPacket(int socket, absl::string_view head, absl::string_view body) {
  iovec pieces[] = {{const_cast<char*>(head.data()), head.size()},
                    {const_cast<char*>(body.data()), body.size()}};
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = body.empty() ? 1 : 2;
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(head.size() + body.size());
}

}  // namespace emberd::lanes
