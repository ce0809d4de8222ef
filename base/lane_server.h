// Answers small calls of processes on this machine over Unix sockets, where gRPC would cost many
// times what the work does. The other end is LanePool.
//
// A client is invited: whoever serves it by gRPC, and has checked who it is, tells it the name of a
// socket and a ticket. Each ticket is good for one connection, a lane, which has a thread: it waits
// for a request, works on it, and answers. So nothing is handed from thread to thread, and a client
// makes one call at a time on a lane.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/lane_protocol.h"
#include "base/mutex.h"

namespace emberd {

// Who was given the ticket of a lane, as the one who invited it knows it.
struct LanePeer {
  std::string address;      // "127.0.0.1"
  std::string certificate;  // the name in it; empty: none
  std::string agent;        // what it says that it is
};

struct LaneInvitation {
  std::string socket;
  std::string ticket;
};

// A call under way. Belongs to the thread of its lane.
class LaneCall {
 public:
  virtual ~LaneCall() = default;
  virtual const lanes::Request& request() const = 0;
  virtual const LanePeer& peer() const = 0;
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

// Thread-safe. Has a thread, which sleeps unless somebody comes or goes, and one for each lane.
class LaneServer {
 public:
  // Called on the threads of lanes, at the same time. May block.
  using Handler = std::function<LaneAnswer(LaneCall* call)>;
  struct Options {
    std::string name = "lane";  // of the socket, for people
    bool any_user = false;      // else peers of this process's user alone
    int max_lanes = 256;
    absl::Duration ticket_life = absl::Seconds(10);
  };
  // UNAVAILABLE if the system gives no socket.
  static absl::StatusOr<std::unique_ptr<LaneServer>> Start(Options options, Handler handler);
  // As Drain, without any grace.
  ~LaneServer();

  LaneInvitation Invite(LanePeer peer);

  // Takes no new calls, lets those in progress end for at most `grace`, then cancels them. Blocks
  // until all is over.
  void Drain(absl::Duration grace);

  int lanes() const;

 private:
  class Lane;
  struct Ticket {
    std::string bytes;
    LanePeer peer;
    absl::Time expiry;
  };
  struct Stranger {  // connected, and has not shown a ticket yet
    FileDescriptor socket;
    absl::Time expiry;
  };

  LaneServer(Options options, Handler handler);
  absl::Status Listen();
  void Wake();
  void Serve();
  // What Serve waits for. False: the server has to stop.
  bool Await();
  // Makes a lane of a stranger who shows a ticket; else forgets it.
  void Admit(FileDescriptor socket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TakeTicket(const char* half, Ticket* ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Joins the threads of lanes that are over.
  void Bury();

  const Options options_;
  const Handler handler_;
  std::string socket_name_;
  FileDescriptor listener_;
  FileDescriptor wake_;  // readable when there is something new for the thread

  mutable Mutex mutex_;
  CondVar lane_ended_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Ticket> tickets_ ABSL_GUARDED_BY(mutex_);
  std::vector<Stranger> strangers_ ABSL_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace emberd
