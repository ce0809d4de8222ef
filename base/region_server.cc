#include "base/region_server.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace emberd {

class RegionServer::Peer final : public LocalGuest {
 public:
  Peer(RegionServer* server, FileDescriptor socket) : server_(server), socket_(std::move(socket)) {
    server_->peers_.fetch_add(1);
  }
  ~Peer() override {
    server_->Forget(this);
    server_->peers_.fetch_sub(1);
  }
  int socket() const override { return socket_.get(); }
  short events() const override { return POLLIN; }
  void OnEvent() override { over_ = !server_->Answer(this); }
  bool over() const override { return over_; }

  int regions = 0;
  int lent = 0;

 private:
  RegionServer* const server_;
  const FileDescriptor socket_;
  bool over_ = false;
};

std::unique_ptr<LocalGuest> RegionServer::Enter(FileDescriptor socket, LocalPeer, LocalServer*) {
  if (peers_.load() >= options_.max_peers) return nullptr;
  return std::make_unique<Peer>(this, std::move(socket));
}

absl::StatusOr<std::shared_ptr<char>> RegionServer::Find(uint64_t region, uint64_t offset,
                                                         uint64_t bytes) const {
  const std::shared_ptr<SharedRegion> found = Region(region);
  if (found == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no shared region ", absl::Hex(region, absl::kZeroPad16),
                     "; ask for new ones, or send the data in the message"));
  }
  if (!found->Holds(offset, bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("offset ", offset, " and size ", bytes, " are not inside shared region ",
                     absl::Hex(region, absl::kZeroPad16), " of ", found->size(), " bytes"));
  }
  return std::shared_ptr<char>(found, found->data() + offset);
}

std::shared_ptr<SharedRegion> RegionServer::Region(uint64_t region) const {
  MutexLock lock(&mutex_);
  const auto held = regions_.find(region);
  return held == regions_.end() ? nullptr : held->second.region;
}

int RegionServer::regions() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(regions_.size());
}

bool RegionServer::Answer(Peer* peer) {
  FileDescriptor file;
  const std::optional<regions::Request> request = regions::ReceiveRequest(peer->socket(), &file);
  if (!request.has_value()) return false;  // gone, or no peer of ours
  std::shared_ptr<SharedRegion> given;
  regions::Answer answer;
  switch (request->kind) {
    case regions::kTake:
      answer = Give(peer, request->bytes, &given);
      break;
    case regions::kLend:
      answer = Borrow(peer, *request, std::move(file));
      break;
    case regions::kDrop:
      Drop(peer, request->region);
      return true;
    default:
      return false;
  }
  return regions::SendPacket(peer->socket(), answer, MSG_DONTWAIT,
                             given == nullptr ? -1 : given->descriptor());
}

regions::Answer RegionServer::Give(Peer* peer, uint64_t bytes,
                                   std::shared_ptr<SharedRegion>* given) {
  const uint64_t left = options_.max_bytes - std::min(options_.max_bytes, bytes_->load());
  MutexLock lock(&mutex_);
  if (bytes == 0 || bytes > left || peer->regions == options_.max_regions_of_peer ||
      !MayHaveRegion()) {
    return {0, left};
  }
  auto region = SharedRegion::Create(options_.name.c_str(), bytes);
  // Nobody can guess it, so to know it is to have been given the region.
  uint64_t name = 0;
  RandomBytes(sizeof(name)).value_or("").copy(reinterpret_cast<char*>(&name), sizeof(name));
  if (!region.ok() || name == 0) return {0, left};
  *bytes_ += static_cast<int64_t>(bytes);
  // It counts until the last reference goes, not until its owner does.
  SharedRegion* const raw = region->get();
  given->reset(raw, [kept = *std::move(region), counted = bytes_, bytes](SharedRegion*) mutable {
    kept.reset();
    *counted -= static_cast<int64_t>(bytes);
  });
  regions_[name] = {*given, peer};
  ++peer->regions;
  return {name, bytes};
}

regions::Answer RegionServer::Borrow(Peer* peer, const regions::Request& request,
                                     FileDescriptor file) {
  MutexLock lock(&mutex_);
  if (request.region == 0 || request.bytes == 0 || file.get() < 0 ||
      peer->lent >= options_.max_lent_by_peer || !MayHaveRegion() ||
      regions_.contains(request.region)) {
    return {};
  }
  auto region = SharedRegion::Map(std::move(file), request.bytes);
  if (!region.ok()) return {};
  regions_[request.region] = {*std::move(region), peer, /*lent=*/true};
  ++peer->lent;
  return {request.region, request.bytes};
}

void RegionServer::Drop(Peer* peer, uint64_t region) {
  std::shared_ptr<SharedRegion> dropped;  // unmapped while nobody waits for the mutex
  MutexLock lock(&mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end() || found->second.owner != peer) return;
  --(found->second.lent ? peer->lent : peer->regions);
  dropped = std::move(found->second.region);
  regions_.erase(found);
}

void RegionServer::Forget(Peer* peer) {
  std::vector<std::shared_ptr<SharedRegion>> forgotten;  // as in Drop
  MutexLock lock(&mutex_);
  absl::erase_if(regions_, [&](auto& held) {
    if (held.second.owner != peer) return false;
    forgotten.push_back(std::move(held.second.region));
    return true;
  });
}

}  // namespace emberd
