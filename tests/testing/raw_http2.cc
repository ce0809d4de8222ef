#include "tests/testing/raw_http2.h"

#include <algorithm>
#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::testing {
namespace {

constexpr int kData = 0, kHeaders = 1, kResetStream = 3, kSettings = 4, kPing = 6, kGoAway = 7,
              kWindowUpdate = 8;
constexpr int kAck = 1, kEndStream = 1, kEndHeaders = 4;
constexpr int kInitialWindowSize = 4;  // of the settings
constexpr size_t kFrameHead = 9;
constexpr int64_t kMaxFrame = 16384;
constexpr uint32_t kStream = 1;

std::string BigEndian(uint32_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text.push_back(static_cast<char>(value >> (8 * i)));
  return text;
}
uint32_t FromBigEndian(const char* text, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(text[i]);
  return value;
}

std::string Frame(int type, int flags, uint32_t stream, const std::string& payload) {
  return absl::StrCat(BigEndian(static_cast<uint32_t>(payload.size()), 3), BigEndian(type, 1),
                      BigEndian(flags, 1), BigEndian(stream, 4), payload);
}

// A header field of up to 126 characters, never indexed (RFC 7541, 6.2.2).
std::string Field(const std::string& name, const std::string& value) {
  return absl::StrCat(BigEndian(0, 1), BigEndian(static_cast<uint32_t>(name.size()), 1), name,
                      BigEndian(static_cast<uint32_t>(value.size()), 1), value);
}

int Connect(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port)) return -1;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to));
  return fd;
}

}  // namespace

HalfCall::HalfCall(const std::string& address, const std::string& method, uint32_t message_bytes,
                   const Headers& metadata)
    : socket_(Connect(address)) {
  std::string fields;
  for (const auto& [name, value] : Headers{{":method", "POST"},
                                           {":scheme", "http"},
                                           {":path", method},
                                           {":authority", address},
                                           {"te", "trailers"},
                                           {"content-type", "application/grpc"}}) {
    absl::StrAppend(&fields, Field(name, value));
  }
  for (const auto& [name, value] : metadata) absl::StrAppend(&fields, Field(name, value));
  // Not compressed, and its length: what begins every message of gRPC.
  const std::string announcement = absl::StrCat(BigEndian(0, 1), BigEndian(message_bytes, 4));
  open_ = Write(absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Frame(kSettings, 0, 0, ""),
                             Frame(kHeaders, kEndHeaders, kStream, fields),
                             Frame(kData, 0, kStream, announcement)));
  connection_window_ -= static_cast<int64_t>(announcement.size());
  stream_window_ -= static_cast<int64_t>(announcement.size());
}

bool HalfCall::Write(const std::string& bytes) {
  return send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

bool HalfCall::Send(int64_t bytes, absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (open_ && bytes > 0 && absl::Now() < end) {
    const int64_t now = std::min({bytes, kMaxFrame, connection_window_, stream_window_});
    if (now <= 0) {
      open_ = TakeFrames(end - absl::Now());
      continue;
    }
    open_ =
        Write(Frame(kData, 0, kStream, std::string(now, 'x'))) && TakeFrames(absl::ZeroDuration());
    connection_window_ -= now;
    stream_window_ -= now;
    bytes -= now;
    sent_ += now;
  }
  return open_ && TakeFrames(absl::ZeroDuration());
}

bool HalfCall::TakeFrames(absl::Duration patience) {
  pollfd readable{socket_.get(), POLLIN, 0};
  char buffer[4096];
  while (poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) > 0) {
    patience = absl::ZeroDuration();
    const ssize_t n = recv(socket_.get(), buffer, sizeof(buffer), 0);
    if (n <= 0) return false;
    received_.append(buffer, n);
  }
  while (received_.size() >= kFrameHead) {
    const uint32_t size = FromBigEndian(received_.data(), 3);
    if (received_.size() < kFrameHead + size) break;
    const std::string head = received_.substr(0, kFrameHead);
    const std::string payload = received_.substr(kFrameHead, size);
    received_.erase(0, kFrameHead + size);
    if (!TakeFrame(head[3], head[4], FromBigEndian(head.data() + 5, 4), payload)) return false;
  }
  return true;
}

bool HalfCall::TakeFrame(int type, int flags, uint32_t stream, const std::string& payload) {
  switch (type) {
    case kSettings:
      if ((flags & kAck) != 0) return true;
      for (size_t at = 0; at + 6 <= payload.size(); at += 6) {
        if (FromBigEndian(payload.data() + at, 2) != kInitialWindowSize) continue;
        const int64_t window = FromBigEndian(payload.data() + at + 2, 4);
        stream_window_ += window - std::exchange(first_window_, window);
      }
      return Write(Frame(kSettings, kAck, 0, ""));
    case kPing:
      return (flags & kAck) != 0 || Write(Frame(kPing, kAck, 0, payload));
    case kWindowUpdate:
      (stream == 0 ? connection_window_ : stream_window_) += FromBigEndian(payload.data(), 4);
      return true;
    case kHeaders:
      return (flags & kEndStream) == 0;
    case kResetStream:
    case kGoAway:
      return false;
    default:
      return true;
  }
}

}  // namespace emberd::testing
