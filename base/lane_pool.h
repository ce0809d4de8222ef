// The client's end of lanes (lane_server.h): those to one server, as many as are used at once.
//
// A lane only ever saves time. Where there is none, because the server is on another machine, has
// too many, or has been restarted, calls are made in the other way, gRPC, which also says what is
// wrong with a server that does not answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/lane_protocol.h"
#include "base/local_server.h"
#include "base/mutex.h"

namespace emberd {

class LanePool;

// One call on a lane. Used by one thread, but for Cancel. If it goes away without an answer, the
// server hears that nobody waits any more. The pool must outlive it.
class LaneClientCall {
 public:
  ~LaneClientCall();

  // A server that is silent for so long may be stopped. gRPC finds out, and says so.
  static constexpr absl::Duration kSilence = absl::Seconds(15);

  // Waits for the answer until `deadline`. DEADLINE_EXCEEDED and CANCELLED, which the call ends
  // with here, have the texts of gRPC. Nothing: the lane broke, the server was silent for
  // `silence`, or the call is not for a lane; it has to be made in another way. The body is valid
  // as long as this object is.
  std::optional<lanes::Answer> Receive(absl::Time deadline, absl::Duration silence = kSilence);
  // Thread-safe. Receive returns at once.
  void Cancel();

 private:
  friend class LanePool;
  struct Connection {
    FileDescriptor socket;
    uint64_t calls = 0;
    std::string head;    // of the request
    std::string packet;  // the answer
    int unwatched = 0;   // calls since the last that was watched
    int calls_between_watches = 0;
  };
  LaneClientCall(LanePool* pool, std::unique_ptr<Connection> connection)
      : pool_(pool), connection_(std::move(connection)) {}
  // Until there is something to read, or the connection is over. False: it is `until`.
  bool Await(absl::Time until);
  // True if there is: looked for again and again, as far as the pool wants that.
  bool Watch(absl::Time until);

  LanePool* const pool_;
  std::unique_ptr<Connection> connection_;
  bool answered_ = false;
  std::atomic<bool> cancelled_ = false;
};

// Thread-safe.
class LanePool {
 public:
  // Asks the server, by the other way, where to connect; not later than `deadline`.
  using Ask = std::function<absl::StatusOr<LocalInvitation>(absl::Time deadline)>;
  // `watch`: a thread that waits alone looks for its answer for so long before it sleeps, unless
  // that was in vain of late. To wake a thread, and the core that went idle with it, can take
  // longer than a small call. `patience`: what a server may take to let us in.
  LanePool(int max_lanes, Ask ask, absl::Duration watch = absl::ZeroDuration(),
           absl::Duration patience = absl::Milliseconds(500))
      : max_lanes_(max_lanes), ask_(std::move(ask)), watch_(watch), patience_(patience) {}

  // Sends a request on a free lane; its number does not count. Null: there is none, or the request
  // is too long for a packet. Never waits.
  std::unique_ptr<LaneClientCall> Send(lanes::Request request);

  // To be called after a call that found no free lane was answered in the other way: opens one, if
  // it is likely to work. May wait for the server, but not beyond `deadline`.
  void Grow(absl::Time deadline);

  int lanes() const;
  // Calls that were watched.
  int64_t watches() const { return watches_.load(); }

 private:
  friend class LaneClientCall;
  using Connection = LaneClientCall::Connection;

  std::unique_ptr<Connection> TakeFree();
  // `good`: it may be used again.
  void GiveBack(std::unique_ptr<Connection> connection, bool good);
  // The server of a lane is gone: so are the others that are free.
  void Lose();
  std::unique_ptr<Connection> Open(absl::Time deadline);

  const int max_lanes_;
  const Ask ask_;
  const absl::Duration watch_;
  const absl::Duration patience_;
  std::atomic<int> waiting_ = 0;  // threads that wait for an answer
  std::atomic<int64_t> watches_ = 0;
  mutable Mutex mutex_;
  std::vector<std::unique_ptr<Connection>> free_ ABSL_GUARDED_BY(mutex_);
  int open_ ABSL_GUARDED_BY(mutex_) = 0;  // free ones, and those in use
  bool growing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);  // before next_try_
};

}  // namespace emberd
