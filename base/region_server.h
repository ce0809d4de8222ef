// Gives memory to processes on this machine: the end that owns it. The other end is SharedArena.
//
// A peer that LocalServer has let in takes regions, whose memory it divides as it likes; it names
// places in them, and Find says where they are here. It may also lend regions that another server
// has given: a coordinator those of its clients to a shard. When it goes away, its regions are
// forgotten: they are unmapped when the last reference to them goes.
// See docs/shared_memory.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"
#include "base/mutex.h"
#include "base/region_protocol.h"

namespace emberd {

// A region by the name that its server has given it.
struct NamedRegion {
  uint64_t name = 0;
  std::shared_ptr<SharedRegion> memory;
};

// Thread-safe. What peers ask for is done on the thread of their LocalServer.
class RegionServer final : public LocalHost {
 public:
  struct Options {
    std::string name = "shared";  // of files, for people
    int64_t max_bytes = 0;        // of all regions
    int max_peers = 1024;
    int max_regions = 1024;  // of all peers, with what they lend: each costs a descriptor
    int max_regions_of_peer = 64;
    // Only where peers are other servers: the bytes of these regions count where they were given,
    // and the names are the peers' own.
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

  mutable Mutex mutex_;
  absl::flat_hash_map<uint64_t, Held> regions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd
