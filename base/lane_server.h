// Answers small calls of processes on this machine over Unix sockets, where gRPC would cost many
// times what the work does. The other end is LanePool.
//
// A connection that LocalServer has let in is a lane, which has a thread: it waits for a request,
// works on it, and answers. So nothing is handed from thread to thread, and a client makes one call
// at a time on a lane.
// See docs/shared_memory.md.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/lane_protocol.h"
#include "base/local_server.h"
#include "base/mutex.h"

namespace emberd {

// A call under way. Belongs to the thread of its lane.
class LaneCall {
 public:
  virtual ~LaneCall() = default;
  virtual const lanes::Request& request() const = 0;
  virtual const LocalPeer& peer() const = 0;
  // `cancel` runs, once, on another thread, when the client goes away or the server has to stop; at
  // once if that has happened. It is not called any more, and is not running, after the next call
  // of this, or after the handler has returned. Null: nobody wants to hear of it.
  virtual void OnCancel(std::function<void()> cancel) = 0;
};

// What a handler answers: with an OK status, the body.
struct LaneAnswer {
  absl::Status status = absl::OkStatus();
  std::string body = {};
  // See lanes::Answer. A body that does not fit in a packet counts as such.
  bool elsewhere = false;
};

// Thread-safe. Each lane has a thread.
class LaneServer final : public LocalHost {
 public:
  // Called on the threads of lanes, at the same time. May block.
  using Handler = std::function<LaneAnswer(LaneCall* call)>;
  explicit LaneServer(Handler handler, int max_lanes = 256)
      : handler_(std::move(handler)), max_lanes_(max_lanes) {}

  std::unique_ptr<LocalGuest> Enter(FileDescriptor socket, LocalPeer peer,
                                    LocalServer* server) override;

  // Takes no new calls, lets those in progress end for at most `grace`, then cancels them. Blocks
  // until all is over. The LocalServer has to be there.
  void Drain(absl::Duration grace);

  int lanes() const;

 private:
  class Lane;

  const Handler handler_;
  const int max_lanes_;
  mutable Mutex mutex_;
  CondVar lane_left_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<Lane*> lanes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd
