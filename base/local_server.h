// Lets processes of this machine in, over one Unix socket: those that want memory (regions.h)
// and those that make small calls (lanes.h).
//
// A peer is invited: whoever serves it by gRPC, and has checked who it is, tells it the name of the
// socket and a ticket. Each ticket is good for one connection. The peer says what it comes for and
// shows the first half of its ticket, the server answers with the second: so neither takes somebody
// else for its other end.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"

namespace emberd {

// Who was given a ticket, as the one who invited it knows it.
struct LocalPeer {
  std::string address;      // "127.0.0.1"
  std::string certificate;  // the name in it; empty: none
  std::string agent;        // what it says that it is
};

struct LocalInvitation {
  std::string socket;  // a name in the abstract namespace
  std::string ticket;
};

// What a peer comes for.
enum class LocalKind : uint32_t { kMemory = 1, kCalls = 2 };

// A connection that has been let in. Belongs to the server's thread, which also destroys it.
class LocalGuest {
 public:
  virtual ~LocalGuest() = default;
  virtual int socket() const = 0;
  // What the server's thread waits for on the socket, as of poll(); 0: nothing.
  virtual short events() const = 0;
  // One of them has happened, or the peer is gone.
  virtual void OnEvent() = 0;
  // Whether it has to go. The thread looks after each event, and after LocalServer::Wake.
  virtual bool over() const = 0;
};

class LocalServer;

// Takes guests of one kind. Must outlive the server.
class LocalHost {
 public:
  virtual ~LocalHost() = default;
  // Null: it is refused.
  virtual std::unique_ptr<LocalGuest> Enter(FileDescriptor socket, LocalPeer peer,
                                            LocalServer* server) = 0;
};

// Thread-safe. Has a thread, which sleeps unless somebody comes, goes or wants memory.
class LocalServer {
 public:
  struct Options {
    std::string name = "local";  // of the socket, for people
    bool any_user = false;       // else peers of this process's user alone
    absl::Duration ticket_life = absl::Seconds(10);
    // How long a connection may stay that has not shown a ticket.
    absl::Duration stranger_patience = absl::Seconds(10);
  };
  // `memory` and `calls` take the guests of their kind; null: these are refused. UNAVAILABLE if the
  // system gives no socket.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(Options options, LocalHost* memory,
                                                            LocalHost* calls);
  // Its guests go first.
  ~LocalServer();

  // With a new ticket; to nowhere, if the system gives no random numbers.
  LocalInvitation Invite(LocalPeer peer);
  // Has the thread look which guests are over.
  void Wake();
  // Connections, with those that have not been let in yet.
  int connections() const { return connections_.load(); }

 private:
  struct Ticket {
    std::string bytes;
    LocalPeer peer;
    absl::Time expiry;
  };
  struct Stranger {  // connected, and has not shown a ticket yet
    FileDescriptor socket;
    absl::Time expiry;
  };

  LocalServer(Options options, LocalHost* memory, LocalHost* calls)
      : options_(std::move(options)), memory_(memory), calls_(calls) {}
  absl::Status Listen();
  void Serve();
  // One round; false: the server has to stop.
  bool Await();
  // The connection that waits. None (-1) if there is none, or it is not let in.
  FileDescriptor Accept();
  // Makes a guest of a stranger who shows a ticket; else it goes.
  void Admit(FileDescriptor socket);
  bool TakeTicket(const char* half, Ticket* ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  LocalHost* const memory_;
  LocalHost* const calls_;
  std::string socket_name_;
  FileDescriptor listener_;
  FileDescriptor wake_;  // readable when there is something new for the thread
  std::atomic<bool> stopping_ = false;
  std::atomic<int> connections_ = 0;

  absl::Mutex mutex_;
  std::deque<Ticket> tickets_ ABSL_GUARDED_BY(mutex_);
  // The thread's.
  std::vector<Stranger> strangers_;
  std::vector<std::unique_ptr<LocalGuest>> guests_;
  std::thread thread_;
};

// The other end: connects, and is let in for `kind`, not later than `deadline`. UNAVAILABLE: the
// server is not on this machine, does not want us, or is not the one that has invited us. The
// socket does not block.
absl::StatusOr<FileDescriptor> ConnectLocal(const LocalInvitation& invitation, LocalKind kind,
                                            absl::Time deadline);

// Waits until there is something to read at a socket, or the connection is over. False: `until`
// came first.
bool AwaitReadable(int socket, absl::Time until);

// The first packet each way. Processes of different versions refuse each other by it.
inline constexpr size_t kLocalTicketBytes = 32;
struct LocalHello {
  uint32_t version = kVersion;
  LocalKind kind = LocalKind::kMemory;
  char half_ticket[kLocalTicketBytes / 2] = {};

  static constexpr uint32_t kVersion = 2;
};

// An address in the abstract namespace.
struct AbstractAddress {
  explicit AbstractAddress(const std::string& name);
  bool fits() const { return length > 0; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address = {};
  socklen_t length = 0;  // 0: the name is too long
};

// Bytes that nobody can guess. UNAVAILABLE if the system gives none.
absl::StatusOr<std::string> RandomBytes(size_t size);

}  // namespace emberd
