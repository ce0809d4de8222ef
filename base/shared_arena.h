// Memory that another process on this machine gives: the end that divides it. See RegionServer.
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
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"
#include "base/mutex.h"
#include "base/region_protocol.h"

namespace emberd {

class SharedBlock;

// Thread-safe. Blocks keep it alive.
class SharedArena : public std::enable_shared_from_this<SharedArena> {
 public:
  // How long a server may be silent, which may be stopped, and not gone.
  static constexpr absl::Duration kPatience = absl::Seconds(2);

  // `socket`, `ticket`: of LocalServer::Invite. UNAVAILABLE if that server is not on this machine,
  // does not want us, or is silent until `deadline`, or for as long as `patience`.
  static absl::StatusOr<std::shared_ptr<SharedArena>> Connect(
      const std::string& socket, const std::string& ticket,
      absl::Time deadline = absl::InfiniteFuture(), absl::Duration patience = kPatience);
  ~SharedArena();

  // Whether the server is still there, and has answered all that it was asked. One that has not may
  // be stopped: it is asked nothing more, but it keeps the regions, which requests on their way to
  // it name.
  bool alive() const;
  // A block whose memory begins at a multiple of 4096, with any contents. Null if the server gives
  // no more, is gone, or is silent until `deadline`.
  std::shared_ptr<SharedBlock> Take(size_t bytes, absl::Time deadline = absl::InfiniteFuture());
  // Lends the server a region that another server has given, whose name is `name`, so that places
  // in it may be named to this one, too. False if it does not want it, or is gone.
  bool LendRegion(uint64_t name, const SharedRegion& region);
  // It is lent no longer. The server unmaps it when work on it has ended.
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
  // The server's answer to `request`, with files both ways.
  std::optional<regions::Answer> Ask(const regions::Request& request, int lent, absl::Time deadline,
                                     FileDescriptor* given) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(Region* region, size_t offset, size_t bytes, bool reusable);
  void Remove(Region* region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendDrop(uint64_t name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FileDescriptor socket_;
  const absl::Duration patience_;
  std::atomic<bool> silent_ = false;  // a request has not been answered
  mutable Mutex mutex_;
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
  // It has. If that never comes, once for each Lend, the block's memory is never used again: the
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

// An arena that is there as long as its server is: see SharedArena.
//
// Thread-safe.
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
  Mutex mutex_;
  std::shared_ptr<SharedArena> arena_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);  // before next_try_
};

}  // namespace emberd
