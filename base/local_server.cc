#include "base/local_server.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

constexpr size_t kHalfTicketBytes = sizeof(LocalHello::half_ticket);
// A peer that asks for more tickets than it uses costs the oldest of them.
constexpr size_t kMaxTickets = 256;
constexpr int kBacklog = 64;
// Strangers cost a descriptor each: not many of them are kept.
constexpr size_t kMaxStrangers = 64;
// Where the system gives no descriptor: whoever waits would have us try again at once, and again.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(20);

FileDescriptor NewSocket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

bool IsOfThisUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

bool Send(int socket, const LocalHello& hello) {
  return send(socket, &hello, sizeof(hello), MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof(hello);
}

// The kernel closes files that come with it.
bool Receive(int socket, LocalHello* hello) {
  const ssize_t size = recv(socket, hello, sizeof(*hello), MSG_DONTWAIT | MSG_TRUNC);
  return size == sizeof(*hello) && hello->version == LocalHello::kVersion;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(Options options, LocalHost* memory,
                                                                LocalHost* calls) {
  std::unique_ptr<LocalServer> server(new LocalServer(std::move(options), memory, calls));
  RETURN_IF_ERROR(server->Listen());
  server->thread_ = std::thread([raw = server.get()] { raw->Serve(); });
  return server;
}

absl::Status LocalServer::Listen() {
  ASSIGN_OR_RETURN(const std::string random, RandomBytes(kHalfTicketBytes));
  socket_name_ = absl::StrCat(options_.name, "/", absl::BytesToHexString(random));
  const AbstractAddress address(socket_name_);
  listener_ = NewSocket();
  wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (address.fits() && listener_.get() >= 0 && wake_.get() >= 0 &&
      bind(listener_.get(), address.get(), address.length) == 0 &&
      listen(listener_.get(), kBacklog) == 0) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("cannot listen for processes of this machine: ", strerror(errno)));
}

LocalServer::~LocalServer() {
  if (!thread_.joinable()) return;  // it never listened
  stopping_.store(true);
  Wake();
  thread_.join();
}

LocalInvitation LocalServer::Invite(LocalPeer peer) {
  LocalInvitation invitation{socket_name_, RandomBytes(kLocalTicketBytes).value_or("")};
  if (invitation.ticket.empty()) return {};
  absl::MutexLock lock(&mutex_);
  if (tickets_.size() == kMaxTickets) tickets_.pop_front();
  tickets_.push_back({invitation.ticket, std::move(peer), SteadyNow() + options_.ticket_life});
  return invitation;
}

void LocalServer::Wake() {
  const uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void LocalServer::Serve() {
  while (Await()) {
    std::erase_if(guests_, [](const auto& guest) { return guest->over(); });
    std::erase_if(strangers_, [now = SteadyNow()](const Stranger& stranger) {
      return stranger.socket.get() < 0 || stranger.expiry <= now;
    });
    connections_.store(static_cast<int>(guests_.size() + strangers_.size()));
  }
}

bool LocalServer::Await() {
  std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  for (const Stranger& stranger : strangers_) watched.push_back({stranger.socket.get(), POLLIN, 0});
  for (const auto& guest : guests_) {
    const short events = guest->events();
    watched.push_back({events == 0 ? -1 : guest->socket(), events, 0});
  }
  if (poll(watched.data(), watched.size(), strangers_.empty() ? -1 : 1000) < 0) return true;
  // In this order: what is said after the look at `stopping_` is there for the next poll.
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t woken = read(wake_.get(), &count, sizeof(count));
  if (stopping_.load()) return false;
  for (size_t i = 0; i < guests_.size(); ++i) {
    if (watched[2 + strangers_.size() + i].revents != 0) guests_[i]->OnEvent();
  }
  for (size_t i = 0; i < strangers_.size(); ++i) {
    if (watched[2 + i].revents != 0) Admit(std::move(strangers_[i].socket));
  }
  if (watched[1].revents == 0) return true;
  FileDescriptor arrival = Accept();
  if (arrival.get() < 0) return true;
  if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
  strangers_.push_back({std::move(arrival), SteadyNow() + options_.stranger_patience});
  return true;
}

FileDescriptor LocalServer::Accept() {
  FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.get() < 0) absl::SleepFor(kAcceptPause);
  if (socket.get() < 0 || options_.any_user || IsOfThisUser(socket.get())) return socket;
  return FileDescriptor();
}

void LocalServer::Admit(FileDescriptor socket) {
  LocalHello hello;
  Ticket ticket;
  if (!Receive(socket.get(), &hello) || !TakeTicket(hello.half_ticket, &ticket)) return;
  LocalHost* const host = hello.kind == LocalKind::kMemory  ? memory_
                          : hello.kind == LocalKind::kCalls ? calls_
                                                            : nullptr;
  if (host == nullptr) return;
  std::unique_ptr<LocalGuest> guest = host->Enter(std::move(socket), std::move(ticket.peer), this);
  if (guest == nullptr) return;
  std::memcpy(hello.half_ticket, ticket.bytes.data() + kHalfTicketBytes, kHalfTicketBytes);
  Send(guest->socket(), hello);  // if that fails, the peer is gone, and the next round finds it so
  guests_.push_back(std::move(guest));
}

bool LocalServer::TakeTicket(const char* half, Ticket* ticket) {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = SteadyNow();
  while (!tickets_.empty() && tickets_.front().expiry < now) tickets_.pop_front();
  const auto found = std::find_if(tickets_.begin(), tickets_.end(), [half](const Ticket& held) {
    return std::memcmp(held.bytes.data(), half, kHalfTicketBytes) == 0;
  });
  if (found == tickets_.end()) return false;
  *ticket = std::move(*found);
  tickets_.erase(found);
  return true;
}

absl::StatusOr<FileDescriptor> ConnectLocal(const LocalInvitation& invitation, LocalKind kind,
                                            absl::Time deadline) {
  const AbstractAddress address(invitation.socket);
  FileDescriptor socket = NewSocket();
  if (!address.fits() || invitation.ticket.size() != kLocalTicketBytes || socket.get() < 0) {
    return absl::UnavailableError("the name of the socket, or the ticket, is not valid");
  }
  if (connect(socket.get(), address.get(), address.length) != 0) {
    return absl::UnavailableError(
        absl::StrCat("nobody listens there on this machine: ", strerror(errno)));
  }
  LocalHello hello;
  hello.kind = kind;
  std::memcpy(hello.half_ticket, invitation.ticket.data(), kHalfTicketBytes);
  if (!Send(socket.get(), hello) || !AwaitReadable(socket.get(), deadline) ||
      !Receive(socket.get(), &hello)) {
    return absl::UnavailableError("the ticket, or this user, was refused");
  }
  if (std::memcmp(hello.half_ticket, invitation.ticket.data() + kHalfTicketBytes,
                  kHalfTicketBytes) != 0) {
    return absl::UnavailableError("somebody else listens there: it does not know the ticket");
  }
  return socket;
}

bool AwaitReadable(int socket, absl::Time until) {
  pollfd watched = {socket, POLLIN, 0};
  while (true) {
    const absl::Duration left = std::max(until - SteadyNow(), absl::ZeroDuration());
    const timespec timeout = absl::ToTimespec(left);
    const int ready = ppoll(&watched, 1, &timeout, nullptr);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // recv says what is wrong
    if (left == absl::ZeroDuration()) return false;
  }
}

AbstractAddress::AbstractAddress(const std::string& name) {
  if (name.empty() || name.size() + 1 > sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

absl::StatusOr<std::string> RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  for (size_t filled = 0; filled < size;) {
    const ssize_t got = getrandom(bytes.data() + filled, size - filled, 0);
    if (got < 0 && errno != EINTR)
      return absl::UnavailableError(absl::StrCat("no random numbers: ", strerror(errno)));
    filled += std::max<ssize_t>(got, 0);
  }
  return bytes;
}

}  // namespace emberd
