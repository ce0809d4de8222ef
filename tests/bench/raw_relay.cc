#include "tests/bench/raw_relay.h"

#include <atomic>
#include <deque>
#include <functional>
#include <utility>

#include "absl/synchronization/mutex.h"

namespace emberd::bench {
namespace {

// One direction: a few messages are on their way, so that reading and writing overlap.
class Pipe {
 public:
  struct Ends {
    std::function<void(grpc::ByteBuffer*)> start_read;
    std::function<void(const grpc::ByteBuffer*)> start_write;
    std::function<void()> end;  // all that was read has been written
  };
  explicit Pipe(Ends ends) : ends_(std::move(ends)) {}

  void Begin() {
    absl::MutexLock lock(&mutex_);
    GoOn();
  }
  void OnRead(bool ok) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    over_ = over_ || !ok;
    if (ok) queue_.push_back(std::move(incoming_));
    GoOn();
  }
  void OnWritten(bool ok) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    over_ = over_ || !ok;
    queue_.pop_front();
    GoOn();
  }

 private:
  static constexpr size_t kMostMessages = 4;

  void GoOn() {
    if (!reading_ && !over_ && queue_.size() < kMostMessages) {
      reading_ = true;
      incoming_.Clear();
      ends_.start_read(&incoming_);
    }
    if (!writing_ && !queue_.empty()) {
      writing_ = true;
      ends_.start_write(&queue_.front());
    }
    if (over_ && !reading_ && !writing_ && queue_.empty() && !ended_) {
      ended_ = true;
      ends_.end();
    }
  }

  const Ends ends_;
  absl::Mutex mutex_;
  grpc::ByteBuffer incoming_;
  std::deque<grpc::ByteBuffer> queue_;
  bool reading_ = false, writing_ = false, over_ = false, ended_ = false;
};

// Deletes itself when both of its calls are over.
class Relay final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Relay(grpc::GenericStub* next)
      : onward_(this),
        there_({.start_read = [this](auto* message) { StartRead(message); },
                .start_write = [this](auto* message) { onward_.StartWrite(message); },
                .end =
                    [this] {
                      onward_.StartWritesDone();
                      onward_.RemoveHold();
                    }}),
        back_({.start_read = [this](auto* message) { onward_.StartRead(message); },
               .start_write = [this](auto* message) { StartWrite(message); },
               .end = [this] { Finish(grpc::Status::OK); }}) {
    next->PrepareBidiStreamingCall(&context_, "/raw/Call", grpc::StubOptions(), &onward_);
    onward_.AddHold();  // its writes begin outside of its reactions
    onward_.AddHold();  // and so do its reads
    back_.Begin();
    onward_.StartCall();
    there_.Begin();
  }

 private:
  class Onward final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit Onward(Relay* relay) : relay_(relay) {}
    void OnReadDone(bool ok) override {
      if (!ok) RemoveHold();
      relay_->back_.OnRead(ok);
    }
    void OnWriteDone(bool ok) override { relay_->there_.OnWritten(ok); }
    void OnDone(const grpc::Status&) override { relay_->Unref(); }

   private:
    Relay* relay_;
  };

  void OnReadDone(bool ok) override { there_.OnRead(ok); }
  void OnWriteDone(bool ok) override { back_.OnWritten(ok); }
  void OnDone() override { Unref(); }
  void Unref() {
    if (--calls_ == 0) delete this;
  }

  grpc::ClientContext context_;
  Onward onward_;
  Pipe there_, back_;
  std::atomic<int> calls_ = 2;
};

class RelayService final : public grpc::CallbackGenericService {
 public:
  explicit RelayService(grpc::GenericStub* next) : next_(next) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Relay(next_);
  }

 private:
  grpc::GenericStub* next_;
};

}  // namespace

std::unique_ptr<grpc::CallbackGenericService> MakeRelay(grpc::GenericStub* next) {
  return std::make_unique<RelayService>(next);
}

}  // namespace emberd::bench
