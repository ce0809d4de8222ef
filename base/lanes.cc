#include "base/lanes.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/steady_time.h"

namespace emberd {
namespace lanes {
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

}  // namespace lanes

// ---- The server's end

// One connection and its thread.
class LaneServer::Lane final : public LaneCall, public LocalGuest {
 public:
  Lane(LaneServer* host, FileDescriptor socket, LocalPeer peer, LocalServer* server)
      : host_(host),
        server_(server),
        socket_(std::move(socket)),
        peer_(std::move(peer)),
        thread_([this] { Run(); }) {}
  ~Lane() override {
    Cancel();
    thread_.join();
    absl::MutexLock lock(&host_->mutex_);
    host_->lanes_.erase(this);
    host_->lane_left_.SignalAll();
  }

  const lanes::Request& request() const override { return request_; }
  const LocalPeer& peer() const override { return peer_; }
  void OnCancel(std::function<void()> cancel) override {
    absl::MutexLock lock(&mutex_);
    cancel_ = std::move(cancel);
    if (cancelled_ && cancel_) cancel_();
  }

  int socket() const override { return socket_.get(); }
  // That there is something to read is the lane's own thread's business.
  short events() const override { return closing_.load() || cancelled_.load() ? 0 : POLLRDHUP; }
  void OnEvent() override {
    if (!closing_.load()) Cancel();
  }
  bool over() const override { return over_.load(); }

  // Ends when the call in progress does. What has come already is still answered.
  void CloseSoon() {
    closing_.store(true);
    shutdown(socket_.get(), SHUT_RD);
  }
  // Ends the call in progress too.
  void Cancel() {
    shutdown(socket_.get(), SHUT_RD);
    absl::MutexLock lock(&mutex_);
    if (cancelled_.exchange(true)) return;
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
    const LaneAnswer answer = host_->handler_(this);
    OnCancel(nullptr);
    lanes::Answer sent{request_.number, answer.elsewhere, answer.status, answer.body};
    if (!lanes::EncodeHead(sent, &head_)) {
      sent = {request_.number, /*elsewhere=*/true};
      lanes::EncodeHead(sent, &head_);
    }
    // A client takes its answer before it asks again, so there is always room.
    return lanes::SendPacket(socket_.get(), head_, sent.body);
  }

  LaneServer* const host_;
  LocalServer* const server_;
  const FileDescriptor socket_;
  const LocalPeer peer_;
  lanes::Request request_;  // these two are the thread's
  std::string head_;
  std::atomic<bool> over_ = false;
  std::atomic<bool> closing_ = false;    // the socket then looks as if the client had gone
  std::atomic<bool> cancelled_ = false;  // set with the mutex
  absl::Mutex mutex_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // the last: it uses all others
};

std::unique_ptr<LocalGuest> LaneServer::Enter(FileDescriptor socket, LocalPeer peer,
                                              LocalServer* server) {
  absl::MutexLock lock(&mutex_);
  if (draining_ || static_cast<int>(lanes_.size()) >= max_lanes_) return nullptr;
  try {
    auto lane = std::make_unique<Lane>(this, std::move(socket), std::move(peer), server);
    lanes_.insert(lane.get());
    return lane;
  } catch (const std::system_error&) {
    return nullptr;  // no thread can be had: the client finds its lane closed
  }
}

void LaneServer::Drain(absl::Duration grace) {
  const absl::Time end = SteadyNow() + grace;
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  for (Lane* const lane : lanes_) lane->CloseSoon();
  while (!lanes_.empty() && WaitSteadily(&lane_left_, &mutex_, end)) {
  }
  for (Lane* const lane : lanes_) lane->Cancel();
  while (!lanes_.empty()) lane_left_.Wait(&mutex_);
}

int LaneServer::lanes() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(lanes_.size());
}

// ---- The client's end

namespace {

// A server on another machine stays there, so that it is asked less and less often.
constexpr absl::Duration kFirstLanePause = absl::Milliseconds(200);
constexpr absl::Duration kLongestLanePause = absl::Seconds(30);
// After one that was watched in vain, so many calls are not; more if it stays so, fewer if it does
// not. Where others compete for the cores, whoever looks for its answer gets it late.
constexpr int kFewestUnwatched = 4, kMostUnwatched = 1024;

bool IsReadable(int socket) {
  pollfd watched = {socket, POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

}  // namespace

LaneClientCall::~LaneClientCall() {
  pool_->GiveBack(std::move(connection_), answered_ && !cancelled_.load());
}

void LaneClientCall::Cancel() {
  cancelled_.store(true);
  shutdown(connection_->socket.get(), SHUT_RDWR);
}

bool LaneClientCall::Await(absl::Time until) {
  pool_->waiting_.fetch_add(1);
  const bool readable = Watch(until) || AwaitReadable(connection_->socket.get(), until);
  pool_->waiting_.fetch_sub(1);
  return readable;
}

bool LaneClientCall::Watch(absl::Time until) {
  Connection& lane = *connection_;
  const bool may = pool_->watch_ > absl::ZeroDuration() && pool_->waiting_.load() == 1;
  if (!may || lane.unwatched++ < lane.calls_between_watches) return false;
  lane.unwatched = 0;
  pool_->watches_.fetch_add(1);
  const absl::Time end = std::min(until, SteadyNow() + pool_->watch_);
  while (SteadyNow() < end) {
    if (IsReadable(lane.socket.get())) {
      lane.calls_between_watches /= 2;
      return true;
    }
    if (pool_->waiting_.load() > 1) return false;
    sched_yield();  // the server may need this core
  }
  lane.calls_between_watches =
      std::clamp(2 * lane.calls_between_watches, kFewestUnwatched, kMostUnwatched);
  return false;
}

std::optional<lanes::Answer> LaneClientCall::Receive(absl::Time deadline, absl::Duration silence) {
  const int socket = connection_->socket.get();
  const absl::Time patience = SteadyNow() + silence;
  const bool readable = Await(std::min(deadline, patience));
  if (cancelled_.load()) return lanes::Answer{.status = absl::CancelledError("CANCELLED")};
  if (!readable && deadline <= patience) {
    return lanes::Answer{.status = absl::DeadlineExceededError("Deadline Exceeded")};
  }
  if (!readable) return std::nullopt;
  std::string& packet = connection_->packet;
  const ssize_t size = recv(socket, packet.data(), packet.size(), MSG_DONTWAIT | MSG_TRUNC);
  std::optional<lanes::Answer> answer;
  if (size > 0 && size <= static_cast<ssize_t>(packet.size())) {
    answer = lanes::DecodeAnswer(absl::string_view(packet.data(), size));
  }
  if (!answer.has_value() || answer->number != connection_->calls) {
    if (cancelled_.load()) return lanes::Answer{.status = absl::CancelledError("CANCELLED")};
    pool_->Lose();
    return std::nullopt;
  }
  answered_ = true;
  if (answer->elsewhere) return std::nullopt;
  return answer;
}

std::unique_ptr<LaneClientCall> LanePool::Send(lanes::Request request) {
  std::unique_ptr<Connection> lane = TakeFree();
  if (lane == nullptr) return nullptr;
  request.number = ++lane->calls;
  if (!lanes::EncodeHead(request, &lane->head)) {
    GiveBack(std::move(lane), /*good=*/true);
    return nullptr;
  }
  if (!lanes::SendPacket(lane->socket.get(), lane->head, request.body)) {
    GiveBack(std::move(lane), /*good=*/false);
    Lose();
    return nullptr;
  }
  return std::unique_ptr<LaneClientCall>(new LaneClientCall(this, std::move(lane)));
}

std::unique_ptr<LanePool::Connection> LanePool::TakeFree() {
  absl::MutexLock lock(&mutex_);
  if (free_.empty()) return nullptr;
  // The one that was used last: its server's thread may still be warm.
  std::unique_ptr<Connection> lane = std::move(free_.back());
  free_.pop_back();
  return lane;
}

void LanePool::GiveBack(std::unique_ptr<Connection> connection, bool good) {
  absl::MutexLock lock(&mutex_);
  if (good) {
    free_.push_back(std::move(connection));
  } else {
    --open_;
  }
}

void LanePool::Lose() {
  std::vector<std::unique_ptr<Connection>> lost;
  absl::MutexLock lock(&mutex_);
  lost.swap(free_);
  open_ -= static_cast<int>(lost.size());
  // Whoever serves there next may be asked at once.
  next_try_ = absl::InfinitePast();
  pause_ = absl::ZeroDuration();
}

void LanePool::Grow(absl::Time deadline) {
  {
    absl::MutexLock lock(&mutex_);
    if (growing_ || open_ >= max_lanes_ || !free_.empty() || SteadyNow() < next_try_) return;
    growing_ = true;
  }
  std::unique_ptr<Connection> lane = Open(std::min(deadline, SteadyNow() + patience_));
  absl::MutexLock lock(&mutex_);
  growing_ = false;
  if (lane == nullptr) {
    pause_ = std::clamp(2 * pause_, kFirstLanePause, kLongestLanePause);
    next_try_ = SteadyNow() + pause_;
    return;
  }
  pause_ = absl::ZeroDuration();
  free_.push_back(std::move(lane));
  ++open_;
}

std::unique_ptr<LanePool::Connection> LanePool::Open(absl::Time deadline) {
  const absl::StatusOr<LocalInvitation> invitation = ask_(deadline);
  if (!invitation.ok()) return nullptr;
  absl::StatusOr<FileDescriptor> socket = ConnectLocal(*invitation, LocalKind::kCalls, deadline);
  if (!socket.ok()) return nullptr;
  auto lane = std::make_unique<Connection>();
  lane->socket = *std::move(socket);
  lane->packet.resize(lanes::kMaxPacketBytes);
  return lane;
}

int LanePool::lanes() const {
  absl::MutexLock lock(&mutex_);
  return open_;
}

}  // namespace emberd
