#include "client/demo/wire.h"

#include <cerrno>

#include <sys/socket.h>

#include "absl/strings/str_cat.h"

namespace emberd::demo {

namespace {

struct Header {
  uint32_t kind;
  uint32_t size;
};

absl::Status SendAll(int socket, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return absl::UnavailableError(absl::StrCat("send: ", std::strerror(errno)));
    data += sent;
    size -= sent;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SendFrame(int socket, uint32_t kind, std::string_view payload) {
  const Header header{kind, static_cast<uint32_t>(payload.size())};
  const absl::Status status =
      SendAll(socket, reinterpret_cast<const char*>(&header), sizeof(header));
  return status.ok() ? SendAll(socket, payload.data(), payload.size()) : status;
}

absl::Status FrameReader::Read(int flags) {
  char buffer[1 << 16];
  while (true) {
    const ssize_t received = recv(socket_, buffer, sizeof(buffer), flags);
    if (received > 0) {
      bytes_.append(buffer, received);
      return absl::OkStatus();
    }
    if (received == 0) return absl::UnavailableError("the other end is gone");
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("recv: ", std::strerror(errno)));
  }
}

absl::StatusOr<Frame> FrameReader::Receive() {
  while (true) {
    if (std::optional<Frame> frame = Next()) return *std::move(frame);
    if (auto s = Read(0); !s.ok()) return s;
  }
}

absl::Status FrameReader::Poll() { return Read(MSG_DONTWAIT); }

std::optional<Frame> FrameReader::Next() {
  Header header;
  if (bytes_.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes_.data(), sizeof(header));
  if (bytes_.size() - sizeof(header) < header.size) return std::nullopt;
  Frame frame{header.kind, bytes_.substr(sizeof(header), header.size)};
  bytes_.erase(0, sizeof(header) + header.size);
  return frame;
}

}  // namespace emberd::demo
