#include "base/lane_server.h"

#include <atomic>
#include <cerrno>
#include <optional>
#include <system_error>
#include <thread>

#include <poll.h>
#include <sys/socket.h>

#include "base/steady_time.h"

namespace emberd {

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
    MutexLock lock(&host_->mutex_);
    host_->lanes_.erase(this);
    host_->lane_left_.SignalAll();
  }

  const lanes::Request& request() const override { return request_; }
  const LocalPeer& peer() const override { return peer_; }
  void OnCancel(std::function<void()> cancel) override {
    MutexLock lock(&mutex_);
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
    MutexLock lock(&mutex_);
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
  Mutex mutex_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // the last: it uses all others
};

std::unique_ptr<LocalGuest> LaneServer::Enter(FileDescriptor socket, LocalPeer peer,
                                              LocalServer* server) {
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
  draining_ = true;
  for (Lane* const lane : lanes_) lane->CloseSoon();
  while (!lanes_.empty() && WaitSteadily(&lane_left_, &mutex_, end)) {
  }
  for (Lane* const lane : lanes_) lane->Cancel();
  while (!lanes_.empty()) lane_left_.Wait(&mutex_);
}

int LaneServer::lanes() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(lanes_.size());
}

}  // namespace emberd
