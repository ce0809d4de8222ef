// Lanes: small calls between processes on this machine over Unix sockets, where gRPC would cost
// many times what the work does.
//
// A connection that LocalServer has let in is a lane. At one end it has a thread of LaneServer,
// which waits for a request, works on it, and answers. At the other end is LanePool, which makes
// one call at a time on a lane. So nothing is handed from thread to thread. One packet is a
// request, one packet its answer.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"

namespace emberd {

// What goes over a lane.
namespace lanes {

// Of one packet, all in all.
inline constexpr size_t kMaxPacketBytes = size_t{64} << 10;

struct Request {
  uint64_t number = 0;                                 // its answer has the same
  uint32_t method = 0;                                 // as both ends have agreed
  absl::Duration patience = absl::InfiniteDuration();  // the answer is of no use later
  absl::string_view authorization = {};                // as in the header of a gRPC call
  absl::string_view trace = {};                        // "traceparent"; empty: none
  absl::string_view body = {};
};

struct Answer {
  uint64_t number = 0;
  // The call is not for a lane: it has to be made in another way, as if this had not been asked.
  bool elsewhere = false;
  absl::Status status = absl::OkStatus();
  absl::string_view body = {};  // only with an OK status
};

// A packet as two pieces: what stands before the body, and the body. False if it is too long.
bool EncodeHead(const Request& request, std::string* head);
// A message that is too long is cut; false if the body is.
bool EncodeHead(const Answer& answer, std::string* head);

// Nothing if the packet is none of these. Views are into `packet`.
std::optional<Request> DecodeRequest(absl::string_view packet);
std::optional<Answer> DecodeAnswer(absl::string_view packet);

// Sends a packet without waiting, and without SIGPIPE. False if it cannot be sent at once.
bool SendPacket(int socket, absl::string_view head, absl::string_view body);

}  // namespace lanes

// A call under way. Belongs to the thread of its lane.
class LaneCall {
 public:
  virtual ~LaneCall() = default;
  virtual const lanes::Request& request() const = 0;
  virtual const LocalPeer& peer() const = 0;
  // `cancel` runs once, on another thread, when the client goes away or the server has to stop; at
  // once if that has happened already. It is not running, and never will, when the next OnCancel
  // has returned, or the handler has. Null: nobody wants to hear of it.
  virtual void OnCancel(std::function<void()> cancel) = 0;
};

// What a handler answers: with an OK status, the body.
struct LaneAnswer {
  absl::Status status = absl::OkStatus();
  std::string body = {};
  // See lanes::Answer. An answer whose body does not fit in a packet is sent as one with this set.
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
  mutable absl::Mutex mutex_;
  absl::CondVar lane_left_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<Lane*> lanes_ ABSL_GUARDED_BY(mutex_);
};

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
  // Waits until there is something to read, or the connection is over. False: `until` came first.
  bool Await(absl::Time until);
  // Polls for something to read, for as long as the pool wants that. True: there is something.
  bool Watch(absl::Time until);

  LanePool* const pool_;
  std::unique_ptr<Connection> connection_;
  bool answered_ = false;
  std::atomic<bool> cancelled_ = false;
};

// The client's end of lanes: those to one server.
//
// A lane only ever saves time. Where there is none, because the server is on another machine, has
// too many, or has been restarted, calls are made in the other way, gRPC, which also says what is
// wrong with a server that does not answer. Thread-safe.
class LanePool {
 public:
  // Asks the server, by the other way, where to connect; not later than `deadline`.
  using Ask = std::function<absl::StatusOr<LocalInvitation>(absl::Time deadline)>;
  // `watch`: a thread polls for its answer this long before it sleeps, if no other thread waits,
  // and polling was not in vain of late: waking a thread, and the core that went idle with it, can
  // take longer than a small call. `patience`: what a server may take to let us in.
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
  // Calls whose answers a thread has polled for.
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
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Connection>> free_ ABSL_GUARDED_BY(mutex_);
  int open_ ABSL_GUARDED_BY(mutex_) = 0;  // free ones, and those in use
  bool growing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);  // before next_try_
};

}  // namespace emberd
