// Memory that processes on one machine share: regions, which are sealed memory files that both map.
//
// RegionServer is the end that owns the memory. A peer that LocalServer has let in takes regions.
// SharedArena, the peer's end, divides them into blocks as it likes, and names places in them; Find
// of RegionServer says where these are. A peer may also lend regions that another server gave it: a
// coordinator lends those of its clients to a shard. When a peer goes away, its regions are
// forgotten: they are unmapped when the last reference to them goes.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"

namespace emberd {

// A mapping of a sealed memory file. It is zero until somebody writes to it, and costs nothing
// until touched. Whoever has the file can write to it at any time, but nobody can make it shorter:
// to read and write the mapping is always safe, whatever the other process does. Thread-safe.
class SharedRegion {
 public:
  // A new file; `name` shows in /proc. RESOURCE_EXHAUSTED if the system gives none.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Create(const char* name, size_t bytes);
  // The file that another process has created. INVALID_ARGUMENT if it has another size, or could be
  // made shorter.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Map(FileDescriptor file, size_t bytes);

  ~SharedRegion();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return file_.get(); }
  // From now on, what this process writes to the pages of these bytes stays in it, and others keep
  // what they see now. Both numbers must be multiples of a page. False: the system refused.
  bool KeepFromOthers(uint64_t offset, uint64_t bytes);
  // Whether `bytes` from `offset` on lie inside.
  bool Holds(uint64_t offset, uint64_t bytes) const {
    return bytes <= size_ && offset <= size_ - bytes;
  }

 private:
  SharedRegion(FileDescriptor file, char* data, size_t size)
      : file_(std::move(file)), data_(data), size_(size) {}
  static absl::StatusOr<std::shared_ptr<SharedRegion>> MapFile(FileDescriptor file, size_t bytes);

  const FileDescriptor file_;
  char* const data_;
  const size_t size_;
};

// What goes over the socket, one packet each way at a time.
namespace regions {

enum Kind : uint32_t {
  kTake = 1,  // a new region of `bytes`
  kDrop = 2,  // `region` is not used any more; has no answer
  kLend = 3,  // with the file of `region`, which has `bytes` and is another server's
};
struct Request {
  uint32_t kind = 0;
  uint32_t reserved = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
};
// To kTake, with the region's file if `region` is not 0. To kLend: `region` is 0 if it is not
// wanted.
struct Answer {
  uint64_t region = 0;
  uint64_t bytes = 0;  // of the region; if there is none, how many could be had
};

// Never raises SIGPIPE. `file`: -1 for none. False if the packet could not be sent, or, where the
// flags have MSG_DONTWAIT, not at once.
template <typename Packet>
bool SendPacket(int socket, const Packet& packet, int flags, int file = -1);
// Nothing if there is none, or it is not one of these, or more than one file came with it. `file`:
// what came with it.
std::optional<Request> ReceiveRequest(int socket, FileDescriptor* file);
std::optional<Answer> ReceiveAnswer(int socket, FileDescriptor* file);

}  // namespace regions

// A region by the name that its server has given it.
struct NamedRegion {
  uint64_t name = 0;
  std::shared_ptr<SharedRegion> memory;
};

// The end that owns regions. Thread-safe. What peers ask for is done on the thread of their
// LocalServer.
class RegionServer final : public LocalHost {
 public:
  struct Options {
    std::string name = "shared";  // of files, for people
    int64_t max_bytes = 0;        // of all regions
    int max_peers = 1024;
    int max_regions = 1024;  // of all peers, with what they lend: each costs a descriptor
    int max_regions_of_peer = 64;
    // Not 0 only if peers are servers themselves. The bytes of such regions count where they were
    // given, and their names are the peers' own.
    int max_lent_by_peer = 0;
  };
  // Regions live on as long as somebody refers to their memory.
  explicit RegionServer(Options options) : options_(std::move(options)) {}

  std::unique_ptr<LocalGuest> Enter(FileDescriptor socket, LocalPeer, LocalServer*) override;

  // `bytes` from `offset` on in a region of any peer, which stays mapped as long as the result
  // lives. Its contents may change at any time: what has to be true must be copied first, then
  // checked. FAILED_PRECONDITION if there is no such region, INVALID_ARGUMENT if the place is not
  // inside.
  absl::StatusOr<std::shared_ptr<char>> Find(uint64_t region, uint64_t offset,
                                             uint64_t bytes) const;

  // All of a region, to be lent to another server; null if there is none of this name.
  std::shared_ptr<SharedRegion> Region(uint64_t region) const;

  int peers() const { return peers_.load(); }
  int regions() const;                              // lent ones too
  int64_t bytes() const { return bytes_->load(); }  // of regions that are mapped

 private:
  class Peer;
  struct Held {
    std::shared_ptr<SharedRegion> region;
    Peer* owner = nullptr;
    bool lent = false;
  };

  bool MayHaveRegion() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(regions_.size()) < options_.max_regions;
  }
  // False: the peer is to go.
  bool Answer(Peer* peer);
  regions::Answer Give(Peer* peer, uint64_t bytes, std::shared_ptr<SharedRegion>* given);
  regions::Answer Borrow(Peer* peer, const regions::Request& request, FileDescriptor file);
  void Drop(Peer* peer, uint64_t region);
  void Forget(Peer* peer);

  const Options options_;
  // Regions outlive the server where somebody works on them.
  const std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int> peers_ = 0;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Held> regions_ ABSL_GUARDED_BY(mutex_);
};

class SharedBlock;

// The end that divides regions. Thread-safe. Blocks keep it alive.
class SharedArena : public std::enable_shared_from_this<SharedArena> {
 public:
  // How long a server may be silent: it may be stopped, and not gone.
  static constexpr absl::Duration kPatience = absl::Seconds(2);

  // `socket`, `ticket`: of LocalServer::Invite. UNAVAILABLE if that server is not on this machine,
  // does not want us, or is silent until `deadline`, or for as long as `patience`.
  static absl::StatusOr<std::shared_ptr<SharedArena>> Connect(
      const std::string& socket, const std::string& ticket,
      absl::Time deadline = absl::InfiniteFuture(), absl::Duration patience = kPatience);

  // Whether the server is still there, and has answered all that it was asked. One that has not may
  // be stopped: it is asked nothing more, but it keeps the regions, for requests on their way to it
  // name them.
  bool alive() const;
  // A block whose memory begins at a multiple of 4096, with any contents. Null if the server gives
  // no more, is gone, or is silent until `deadline`.
  std::shared_ptr<SharedBlock> Take(size_t bytes, absl::Time deadline = absl::InfiniteFuture());
  // Lends the server a region that another server has given, whose name is `name`, so that places
  // in it may be named to this one, too. False if it does not want it, is gone, or is silent.
  bool LendRegion(uint64_t name, const SharedRegion& region,
                  absl::Time deadline = absl::InfiniteFuture());
  // Ends LendRegion. The server unmaps the region when work on it has ended.
  void TakeBack(uint64_t name);
  int regions() const;

 private:
  friend class SharedBlock;
  struct Region {
    uint64_t name = 0;
    std::shared_ptr<SharedRegion> memory;
    std::map<size_t, size_t> free;  // offset -> size; no two touch
    int blocks = 0;                 // in use
    bool retired = false;
  };

  SharedArena(FileDescriptor socket, absl::Duration patience)
      : socket_(std::move(socket)), patience_(patience) {}
  // From what is free.
  std::shared_ptr<SharedBlock> TakeFree(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AddRegion(size_t bytes, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The server's answer to `request`, with files both ways. Without the mutex while it waits.
  std::optional<regions::Answer> Ask(const regions::Request& request, int lent, absl::Time deadline,
                                     FileDescriptor* given) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(Region* region, size_t offset, size_t bytes, bool reusable);
  void Remove(Region* region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendDrop(uint64_t name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FileDescriptor socket_;
  const absl::Duration patience_;
  std::atomic<bool> silent_ = false;  // a request has not been answered
  mutable absl::Mutex mutex_;
  bool asking_ ABSL_GUARDED_BY(mutex_) = false;  // some thread waits for an answer
  absl::CondVar asked_;
  std::vector<std::unique_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
};

// A piece of an arena's memory, given back when it goes. Thread-safe.
class SharedBlock {
 public:
  SharedBlock(std::shared_ptr<SharedArena> arena, SharedArena::Region* region, size_t offset,
              size_t taken)
      : arena_(std::move(arena)), region_(region), offset_(offset), taken_(taken) {}
  ~SharedBlock() { arena_->Return(region_, offset_, taken_, lent_ == 0); }

  char* data() const { return region_->memory->data() + offset_; }
  uint64_t region() const { return region_->name; }
  uint64_t offset() const { return offset_; }
  // Whether all of `bytes` bytes from `place` on are the block's.
  bool Holds(const void* place, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data());
    const auto at = reinterpret_cast<uintptr_t>(place);
    return at >= begin && bytes <= taken_ && at - begin <= taken_ - bytes;
  }
  // Where a pointer into the block lies in its region.
  uint64_t OffsetOf(const void* place) const {
    return offset_ + (static_cast<const char*>(place) - data());
  }

  // The server may read or write the block from now on, until it has said that it is done with it.
  void Lend() { ++lent_; }
  // It has said so. Without a Settle for each Lend, the block's memory is never used again: the
  // server may still be at work.
  void Settle() { --lent_; }
  // Instead of Settle: its user may write to it again although the server may still read it. What
  // the server sees stays as it is now; the block is no longer shared.
  void Part();
  bool parted() const { return parted_.load(); }

 private:
  const std::shared_ptr<SharedArena> arena_;
  SharedArena::Region* const region_;
  const size_t offset_;
  const size_t taken_;
  std::atomic<int> lent_ = 0;
  std::atomic<bool> parted_ = false;
};

// An arena that is there as long as its server is: see SharedArena. Thread-safe.
class ArenaLink {
 public:
  // Asks the server where to connect.
  using Ask = std::function<absl::StatusOr<LocalInvitation>(absl::Time deadline)>;
  explicit ArenaLink(Ask ask, absl::Duration patience = SharedArena::kPatience)
      : ask_(std::move(ask)), patience_(patience) {}

  // Null where there is none: the server is on another machine, or does not want to share. May wait
  // for its answer, until `deadline` or for `patience`, once, and again when it has been restarted.
  std::shared_ptr<SharedArena> Get(absl::Time deadline = absl::InfiniteFuture());

 private:
  const Ask ask_;
  const absl::Duration patience_;
  absl::Mutex mutex_;
  bool asking_ ABSL_GUARDED_BY(mutex_) = false;  // some thread does
  absl::CondVar asked_;
  std::shared_ptr<SharedArena> arena_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);  // before next_try_
};

}  // namespace emberd
