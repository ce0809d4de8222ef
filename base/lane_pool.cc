#include "base/lane_pool.h"

#include <algorithm>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include "base/steady_time.h"

namespace emberd {
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
  MutexLock lock(&mutex_);
  if (free_.empty()) return nullptr;
  // The one that was used last: its server's thread may still be warm.
  std::unique_ptr<Connection> lane = std::move(free_.back());
  free_.pop_back();
  return lane;
}

void LanePool::GiveBack(std::unique_ptr<Connection> connection, bool good) {
  MutexLock lock(&mutex_);
  if (good) {
    free_.push_back(std::move(connection));
  } else {
    --open_;
  }
}

void LanePool::Lose() {
  std::vector<std::unique_ptr<Connection>> lost;
  MutexLock lock(&mutex_);
  lost.swap(free_);
  open_ -= static_cast<int>(lost.size());
  // Whoever serves there next may be asked at once.
  next_try_ = absl::InfinitePast();
  pause_ = absl::ZeroDuration();
}

void LanePool::Grow(absl::Time deadline) {
  {
    MutexLock lock(&mutex_);
    if (growing_ || open_ >= max_lanes_ || !free_.empty() || SteadyNow() < next_try_) return;
    growing_ = true;
  }
  std::unique_ptr<Connection> lane = Open(std::min(deadline, SteadyNow() + patience_));
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
  return open_;
}

}  // namespace emberd
