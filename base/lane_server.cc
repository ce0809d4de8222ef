#include "base/lane_server.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/local_socket.h"
#include "base/region_protocol.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

// A client that asks for more tickets than it uses costs the oldest of them.
constexpr size_t kMaxLaneTickets = 256;
constexpr int kLaneBacklog = 64;

}  // namespace

// One connection and its thread.
class LaneServer::Lane final : public LaneCall {
 public:
  Lane(LaneServer* server, FileDescriptor socket, LanePeer peer)
      : server_(server),
        socket_(std::move(socket)),
        peer_(std::move(peer)),
        thread_([this] { Run(); }) {}
  ~Lane() override { thread_.join(); }

  const lanes::Request& request() const override { return request_; }
  const LanePeer& peer() const override { return peer_; }
  void OnCancel(std::function<void()> cancel) override {
    MutexLock lock(&mutex_);
    cancel_ = std::move(cancel);
    if (cancelled_ && cancel_) cancel_();
  }

  // For the server's thread.
  int socket() const { return socket_.get(); }
  bool over() const { return over_.load(); }
  bool cancelled() {
    MutexLock lock(&mutex_);
    return cancelled_;
  }
  // Ends when the call in progress does. What has come already is still answered.
  void CloseSoon() { shutdown(socket_.get(), SHUT_RD); }
  // Ends the call in progress too.
  void Cancel() {
    shutdown(socket_.get(), SHUT_RD);
    MutexLock lock(&mutex_);
    if (std::exchange(cancelled_, true)) return;
    if (cancel_) cancel_();
  }

 private:
  void Run() {
    std::string packet(lanes::kMaxPacketBytes, '\0');
    while (true) {
      const ssize_t size = recv(socket_.get(), packet.data(), packet.size(), MSG_TRUNC);
      if (size < 0 && errno == EINTR) continue;
      // Gone, or no client of ours.
      if (size <= 0 || size > static_cast<ssize_t>(packet.size())) break;
      if (!Answer(absl::string_view(packet.data(), size))) break;
    }
    // The client hears of it now, not when the thread is joined.
    shutdown(socket_.get(), SHUT_RDWR);
    over_.store(true);
    server_->Wake();
  }

  bool Answer(absl::string_view packet) {
    const std::optional<lanes::Request> request = lanes::DecodeRequest(packet);
    if (!request.has_value()) return false;
    request_ = *request;
    const LaneAnswer answer = server_->handler_(this);
    OnCancel(nullptr);
    lanes::Answer sent{request_.number, answer.elsewhere, answer.status, answer.body};
    if (!lanes::EncodeHead(sent, &head_)) {
      sent = {request_.number, /*elsewhere=*/true};
      lanes::EncodeHead(sent, &head_);
    }
    // A client takes its answer before it asks again, so there is always room.
    return lanes::SendPacket(socket_.get(), head_, sent.body);
  }

  LaneServer* const server_;
  const FileDescriptor socket_;
  const LanePeer peer_;
  lanes::Request request_;  // these two are the thread's
  std::string head_;
  std::atomic<bool> over_ = false;
  Mutex mutex_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last: it uses all others
};

LaneServer::LaneServer(Options options, Handler handler)
    : options_(std::move(options)), handler_(std::move(handler)) {}

absl::StatusOr<std::unique_ptr<LaneServer>> LaneServer::Start(Options options, Handler handler) {
  std::unique_ptr<LaneServer> server(new LaneServer(std::move(options), std::move(handler)));
  RETURN_IF_ERROR(server->Listen());
  server->thread_ = std::thread([raw = server.get()] { raw->Serve(); });
  return server;
}

absl::Status LaneServer::Listen() {
  socket_name_ = absl::StrCat(options_.name, "/",
                              absl::BytesToHexString(RandomBytes(lanes::kHalfTicketBytes)));
  const regions::AbstractAddress address(socket_name_);
  listener_ = FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (address.fits() && listener_.get() >= 0 && wake_.get() >= 0 &&
      bind(listener_.get(), address.get(), address.length) == 0 &&
      listen(listener_.get(), kLaneBacklog) == 0) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("cannot listen for calls of this machine: ", strerror(errno)));
}

LaneServer::~LaneServer() { Drain(absl::ZeroDuration()); }

void LaneServer::Drain(absl::Duration grace) {
  if (!thread_.joinable()) return;  // it never listened, or is drained
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    for (const auto& lane : lanes_) lane->CloseSoon();
  }
  Wake();
  const absl::Time end = SteadyNow() + grace;
  {
    MutexLock lock(&mutex_);
    const auto all_over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::all_of(lanes_.begin(), lanes_.end(),
                         [](const auto& lane) { return lane->over(); });
    };
    while (!all_over() && WaitSteadily(&lane_ended_, &mutex_, end)) {
    }
    for (const auto& lane : lanes_) lane->Cancel();
  }
  thread_.join();
  listener_.Close();
  // Joined without the lock, which their threads take at the end.
  std::list<std::unique_ptr<Lane>> rest;
  {
    MutexLock lock(&mutex_);
    rest.swap(lanes_);
    strangers_.clear();
  }
}

LaneInvitation LaneServer::Invite(LanePeer peer) {
  LaneInvitation invitation{socket_name_, RandomBytes(lanes::kTicketBytes)};
  MutexLock lock(&mutex_);
  if (tickets_.size() == kMaxLaneTickets) tickets_.pop_front();
  tickets_.push_back({invitation.ticket, std::move(peer), SteadyNow() + options_.ticket_life});
  return invitation;
}

int LaneServer::lanes() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(lanes_.size());
}

void LaneServer::Wake() {
  const uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  MutexLock lock(&mutex_);
  lane_ended_.SignalAll();
}

void LaneServer::Serve() {
  while (Await()) Bury();
}

bool LaneServer::Await() {
  std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  int timeout_ms = -1;
  size_t strangers = 0;
  {
    MutexLock lock(&mutex_);
    if (stopping_) return false;
    for (const Stranger& stranger : strangers_) {
      watched.push_back({stranger.socket.get(), POLLIN, 0});
      timeout_ms = 1000;
    }
    strangers = strangers_.size();
    // That a lane has something to read is its own thread's business.
    for (const auto& lane : lanes_) {
      watched.push_back({lane->cancelled() ? -1 : lane->socket(), POLLRDHUP, 0});
    }
  }
  if (poll(watched.data(), watched.size(), timeout_ms) < 0) return true;
  FileDescriptor arrival;
  if (watched[1].revents != 0) arrival = AcceptLocal(listener_.get(), options_.any_user);
  MutexLock lock(&mutex_);
  if (stopping_) return false;
  // This thread alone adds and removes lanes and strangers, so they stand where they stood.
  size_t next = 2 + strangers;
  for (const auto& lane : lanes_) {
    if (watched[next++].revents != 0) lane->Cancel();
  }
  std::vector<Stranger> rest;
  for (size_t i = 0; i < strangers; ++i) {
    if (watched[2 + i].revents != 0) {
      Admit(std::move(strangers_[i].socket));
    } else if (SteadyNow() < strangers_[i].expiry) {
      rest.push_back(std::move(strangers_[i]));
    }
  }
  strangers_ = std::move(rest);
  if (arrival.get() >= 0) {
    if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back({std::move(arrival), SteadyNow() + kStrangerPatience});
  }
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t woken = read(wake_.get(), &count, sizeof(count));
  return true;
}

void LaneServer::Admit(FileDescriptor socket) {
  lanes::Hello hello;
  Ticket ticket;
  const ssize_t size = recv(socket.get(), &hello, sizeof(hello), MSG_DONTWAIT | MSG_TRUNC);
  if (size != sizeof(hello) || hello.version != lanes::Hello::kVersion ||
      !TakeTicket(hello.half_ticket, &ticket) ||
      static_cast<int>(lanes_.size()) >= options_.max_lanes) {
    return;
  }
  std::memcpy(hello.half_ticket, ticket.bytes.data() + lanes::kHalfTicketBytes,
              lanes::kHalfTicketBytes);
  const absl::string_view answer(reinterpret_cast<const char*>(&hello), sizeof(hello));
  if (!lanes::SendPacket(socket.get(), answer, "")) return;
  try {
    lanes_.push_back(std::make_unique<Lane>(this, std::move(socket), std::move(ticket.peer)));
  } catch (const std::system_error&) {
    // No thread can be had: the client finds its lane closed.
  }
}

bool LaneServer::TakeTicket(const char* half, Ticket* ticket) {
  const absl::Time now = SteadyNow();
  while (!tickets_.empty() && tickets_.front().expiry < now) tickets_.pop_front();
  for (auto it = tickets_.begin(); it != tickets_.end(); ++it) {
    if (std::memcmp(it->bytes.data(), half, lanes::kHalfTicketBytes) != 0) continue;
    *ticket = std::move(*it);
    tickets_.erase(it);
    return true;
  }
  return false;
}

void LaneServer::Bury() {
  std::list<std::unique_ptr<Lane>> over;  // joined without the lock, as in Drain
  MutexLock lock(&mutex_);
  for (auto lane = lanes_.begin(); lane != lanes_.end();) {
    const auto here = lane++;
    if ((*here)->over()) over.splice(over.end(), lanes_, here);
  }
}

}  // namespace emberd
