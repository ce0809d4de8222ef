// Gives memory to processes on this machine: the end that owns it. The other end is SharedArena.
//
// A peer is invited: whoever serves it in another way, and has checked who it is, tells it the name
// of a Unix socket and a ticket. It connects, shows the ticket and takes regions, whose memory it
// divides as it likes; it names places in them, and Find says where they are here. It may also lend
// regions that another server has given: a coordinator those of its clients to a shard. When it
// goes away, its regions are forgotten: they are unmapped when the last reference to them goes.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/region_protocol.h"
#include "base/shared_region.h"

namespace emberd {

// A region by the name that its server has given it.
struct NamedRegion {
  uint64_t name = 0;
  std::shared_ptr<SharedRegion> memory;
};

// Thread-safe. Has a thread, which sleeps unless a peer asks for something.
class RegionServer {
 public:
  struct Options {
    std::string name = "shared";  // of socket and files, for people
    int64_t max_bytes = 0;        // of all regions
    bool any_user = false;        // else peers of this process's user alone
    int max_peers = 1024;
    int max_regions = 1024;  // of all peers, with what they lend: each costs a descriptor
    int max_regions_of_peer = 64;
    // Only where peers are other servers: the bytes of these regions count where they were given,
    // and the names are the peers' own.
    int max_lent_by_peer = 0;
    absl::Duration ticket_life = absl::Seconds(10);
  };
  // UNAVAILABLE if the system gives no socket.
  static absl::StatusOr<std::unique_ptr<RegionServer>> Start(Options options);
  // Regions live on as long as somebody refers to their memory.
  ~RegionServer();

  struct Invitation {
    std::string socket;
    std::string ticket;
  };
  Invitation Invite();

  // `bytes` from `offset` on in a region of any peer, which stays mapped as long as the result
  // lives. Its contents may change at any time: what has to be true must be copied first, then
  // checked. FAILED_PRECONDITION if there is no such region, INVALID_ARGUMENT if the place is not
  // inside.
  absl::StatusOr<std::shared_ptr<char>> Find(uint64_t region, uint64_t offset,
                                             uint64_t bytes) const;

  // All of a region, to be lent to another server; null if there is none of this name.
  std::shared_ptr<SharedRegion> Region(uint64_t region) const;

  int peers() const;
  int regions() const;                              // lent ones too
  int64_t bytes() const { return bytes_->load(); }  // of regions that are mapped

 private:
  struct Peer {
    FileDescriptor socket;
    bool invited = false;  // has shown a ticket
    absl::Time since;
    int regions = 0;
    int lent = 0;
  };
  struct Held {
    std::shared_ptr<SharedRegion> region;
    int owner = -1;  // the peer's socket
    bool lent = false;
  };
  struct Ticket {
    std::string bytes;
    absl::Time expiry;
  };

  explicit RegionServer(Options options) : options_(std::move(options)) {}
  absl::Status Listen();
  void Serve();
  bool Full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(peers_.size()) >= options_.max_peers;
  }
  bool MayHaveRegion() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(regions_.size()) < options_.max_regions;
  }
  // Ends connections that have not shown a ticket in time, and the oldest where there are too many
  // of them. True if some are left that have shown none yet.
  bool SendStrangersAway() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the peer is to go.
  bool Answer(int socket, Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Give(int socket, Peer* peer, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Borrow(int socket, Peer* peer, const regions::Request& request, FileDescriptor file)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(int socket, Peer* peer, uint64_t region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The ticket whose first half this is. It is good once.
  std::optional<std::string> TakeTicket(uint64_t half) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(int socket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::string socket_name_;
  FileDescriptor listener_;
  FileDescriptor wake_;  // readable when the thread has to stop
  // Regions outlive the server where somebody works on them.
  const std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);

  mutable Mutex mutex_;
  std::deque<Ticket> tickets_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<int, Peer> peers_ ABSL_GUARDED_BY(mutex_);  // by socket
  absl::flat_hash_map<uint64_t, Held> regions_ ABSL_GUARDED_BY(mutex_);
  // The thread's: what it has forgotten, to be unmapped while nobody waits for the mutex.
  std::vector<std::shared_ptr<SharedRegion>> forgotten_;
  std::thread thread_;
};

}  // namespace emberd
