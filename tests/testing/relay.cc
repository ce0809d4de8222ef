#include "tests/testing/relay.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace emberd::testing {
namespace {

constexpr size_t kBufferBytes = 64 << 10;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int PortOf(const std::string& address) {
  int port = 0;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port)) return 0;
  return port;
}

FileDescriptor ConnectTo(const std::string& target) {
  const sockaddr_in to = Loopback(PortOf(target));
  FileDescriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // Between processes of one machine this is done at once.
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) fd.Close();
  return fd;
}

// Ends a connection as the loss of a process does: the other side hears of it at once.
void Reset(FileDescriptor* fd) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd->get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  fd->Close();
}

// One direction of a connection.
struct Pipe {
  std::string waiting;  // bytes that came and were not passed on
  bool ended = false;   // no more will come
  bool told = false;    // and the other side knows

  // What to wait for at either end.
  short ReadEvents() const { return waiting.empty() && !ended ? POLLIN : 0; }
  short WriteEvents() const { return waiting.empty() ? 0 : POLLOUT; }

  // False: the connection is broken.
  bool Read(int from) {
    char buffer[kBufferBytes];
    const ssize_t n = recv(from, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n > 0) waiting.assign(buffer, n);
    ended = n == 0;
    return n >= 0 || errno == EAGAIN;
  }
  bool Write(int to) {
    if (!waiting.empty()) {
      const ssize_t n = send(to, waiting.data(), waiting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0) return errno == EAGAIN;
      waiting.erase(0, n);
    }
    if (waiting.empty() && ended && !std::exchange(told, true)) shutdown(to, SHUT_WR);
    return true;
  }
};

}  // namespace

struct Relay::Connection {
  FileDescriptor near, far;
  Pipe there, back;

  bool over() const { return there.told && back.told; }
  // False: it is broken.
  bool Pass(short near_events, short far_events) {
    if ((near_events & (POLLIN | POLLHUP)) != 0 && there.ReadEvents() != 0 &&
        !there.Read(near.get())) {
      return false;
    }
    if ((far_events & (POLLIN | POLLHUP)) != 0 && back.ReadEvents() != 0 && !back.Read(far.get())) {
      return false;
    }
    return ((near_events | far_events) & (POLLERR | POLLNVAL)) == 0 && there.Write(far.get()) &&
           back.Write(near.get());
  }
  void Break() {
    Reset(&near);
    Reset(&far);
  }
};

Relay::Relay(const std::string& target) : target_(target) {}

absl::StatusOr<std::unique_ptr<Relay>> Relay::Start(const std::string& target) {
  std::unique_ptr<Relay> relay(new Relay(target));
  relay->listening_ = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  relay->wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(relay->listening_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(relay->listening_.get(), SOMAXCONN) != 0 ||
      getsockname(relay->listening_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return absl::UnavailableError(absl::StrCat("no port for a relay: ", std::strerror(errno)));
  }
  relay->address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  relay->thread_ = std::thread([relay = relay.get()] { relay->Run(); });
  return relay;
}

Relay::~Relay() {
  if (!thread_.joinable()) return;
  Set(Mode::kEnding);
  thread_.join();
}

void Relay::Set(Mode mode) {
  mode_ = mode;
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

void Relay::Run() {
  while (true) {
    const Mode mode = mode_;
    if (mode == Mode::kCut || mode == Mode::kEnding) {
      for (Connection& connection : connections_) connection.Break();
      connections_.clear();
    }
    if (mode == Mode::kEnding) return;
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
    if (mode != Mode::kStalled) {
      polled.push_back({listening_.get(), POLLIN, 0});
      for (const Connection& c : connections_) {
        const int near = c.there.ReadEvents() | c.back.WriteEvents();
        const int far = c.back.ReadEvents() | c.there.WriteEvents();
        // One that waits for nothing would report a hang-up again and again.
        polled.push_back({near != 0 ? c.near.get() : -1, static_cast<short>(near), 0});
        polled.push_back({far != 0 ? c.far.get() : -1, static_cast<short>(far), 0});
      }
    }
    poll(polled.data(), polled.size(), -1);
    uint64_t wakes;
    (void)!read(wake_.get(), &wakes, sizeof(wakes));
    if (mode != mode_ || mode == Mode::kStalled) continue;
    size_t next = 2;
    for (auto c = connections_.begin(); c != connections_.end(); next += 2) {
      const bool whole = c->Pass(polled[next].revents, polled[next + 1].revents);
      if (!whole) c->Break();
      c = whole && !c->over() ? std::next(c) : connections_.erase(c);
    }
    if (polled[1].revents != 0) Accept(mode);
  }
}

void Relay::Accept(Mode mode) {
  FileDescriptor near(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (near.get() < 0) return;
  FileDescriptor far = mode == Mode::kCut ? FileDescriptor() : ConnectTo(target_);
  if (far.get() < 0) return Reset(&near);
  const int on = 1;
  for (const FileDescriptor* fd : {&near, &far}) {
    setsockopt(fd->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  connections_.push_back({std::move(near), std::move(far), {}, {}});
}

}  // namespace emberd::testing
