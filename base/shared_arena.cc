#include "base/shared_arena.h"

#include <algorithm>
#include <iterator>

#include <poll.h>
#include <sys/socket.h>

#include "absl/status/status.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

constexpr size_t kPage = 4096;
// Room for a few blocks of a large batch, so that there are few regions.
constexpr size_t kRegionBytes = size_t{64} << 20;

size_t Rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// A server on another machine stays there, so that it is asked less and less often. But one that is
// being restarted may fail in any way, and share in the next moment.
constexpr absl::Duration kFirstPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(30);

}  // namespace

absl::StatusOr<std::shared_ptr<SharedArena>> SharedArena::Connect(const std::string& socket,
                                                                  const std::string& ticket,
                                                                  absl::Time deadline,
                                                                  absl::Duration patience) {
  ASSIGN_OR_RETURN(FileDescriptor connection,
                   ConnectLocal({socket, ticket}, LocalKind::kMemory,
                                std::min(deadline, SteadyNow() + patience)));
  return std::shared_ptr<SharedArena>(new SharedArena(std::move(connection), patience));
}

SharedArena::~SharedArena() = default;

bool SharedArena::alive() const {
  // That there is something to read means no more than that another thread is being answered.
  pollfd watched = {socket_.get(), POLLRDHUP, 0};
  return !silent_ && poll(&watched, 1, 0) == 0;
}

int SharedArena::regions() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(regions_.size());
}

std::shared_ptr<SharedBlock> SharedArena::Take(size_t bytes, absl::Time deadline) {
  bytes = Rounded(std::max<size_t>(bytes, 1), kPage);
  MutexLock lock(&mutex_);
  std::shared_ptr<SharedBlock> block = TakeFree(bytes);
  if (block != nullptr) return block;
  if (AddRegion(std::max(bytes, kRegionBytes), deadline) || AddRegion(bytes, deadline)) {
    return TakeFree(bytes);
  }
  // Batches may have grown: what was enough for earlier ones is in the way of larger regions.
  for (size_t i = regions_.size(); i-- > 0;) {
    if (regions_[i]->blocks == 0) Remove(regions_[i].get());
  }
  return AddRegion(bytes, deadline) ? TakeFree(bytes) : nullptr;
}

std::shared_ptr<SharedBlock> SharedArena::TakeFree(size_t bytes) {
  // The first that fits: memory that was used before is mapped, and maybe still in a cache.
  for (const auto& region : regions_) {
    if (region->retired) continue;
    for (auto hole = region->free.begin(); hole != region->free.end(); ++hole) {
      const auto [offset, size] = *hole;
      if (size < bytes) continue;
      region->free.erase(hole);
      if (size > bytes) region->free[offset + bytes] = size - bytes;
      ++region->blocks;
      return std::make_shared<SharedBlock>(shared_from_this(), region.get(), offset, bytes);
    }
  }
  return nullptr;
}

std::optional<regions::Answer> SharedArena::Ask(const regions::Request& request, int lent,
                                                absl::Time deadline, FileDescriptor* given) {
  // A late answer must not be taken for that to another request.
  if (silent_ || !regions::SendPacket(socket_.get(), request, MSG_DONTWAIT, lent)) {
    return std::nullopt;
  }
  std::optional<regions::Answer> answer;
  if (AwaitReadable(socket_.get(), std::min(deadline, SteadyNow() + patience_))) {
    answer = regions::ReceiveAnswer(socket_.get(), given);
  }
  silent_ = !answer.has_value();
  return answer;
}

bool SharedArena::LendRegion(uint64_t name, const SharedRegion& region) {
  regions::Request request;
  request.kind = regions::kLend;
  request.region = name;
  request.bytes = region.size();
  FileDescriptor none;
  MutexLock lock(&mutex_);
  const std::optional<regions::Answer> answer =
      Ask(request, region.descriptor(), absl::InfiniteFuture(), &none);
  return answer.has_value() && answer->region != 0 && answer->region == name;
}

void SharedArena::TakeBack(uint64_t name) {
  MutexLock lock(&mutex_);
  SendDrop(name);
}

// If it cannot be sent, the server is gone, and the region with it; or it is stopped, and keeps the
// region as long as the connection lasts.
void SharedArena::SendDrop(uint64_t name) {
  regions::Request request;
  request.kind = regions::kDrop;
  request.region = name;
  (void)regions::SendPacket(socket_.get(), request, MSG_DONTWAIT);
}

bool SharedArena::AddRegion(size_t bytes, absl::Time deadline) {
  regions::Request request;
  request.kind = regions::kTake;
  request.bytes = bytes;
  FileDescriptor file;
  const std::optional<regions::Answer> answer = Ask(request, /*lent=*/-1, deadline, &file);
  if (!answer.has_value() || answer->region == 0 || answer->bytes != bytes) return false;
  auto memory = SharedRegion::Map(std::move(file), bytes);
  if (!memory.ok()) {
    SendDrop(answer->region);  // or the server would keep it for us, and count it
    return false;
  }
  auto region = std::make_unique<Region>();
  region->name = answer->region;
  region->memory = *std::move(memory);
  region->free[0] = bytes;
  regions_.push_back(std::move(region));
  return true;
}

void SharedArena::Return(Region* region, size_t offset, size_t bytes, bool reusable) {
  MutexLock lock(&mutex_);
  --region->blocks;
  region->retired |= !reusable;
  if (region->retired) {
    if (region->blocks == 0) Remove(region);
    return;
  }
  auto next = region->free.upper_bound(offset);
  if (next != region->free.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = region->free.erase(next);
  }
  if (next != region->free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  region->free[offset] = bytes;
}

void SharedArena::Remove(Region* region) {
  SendDrop(region->name);
  regions_.erase(std::find_if(regions_.begin(), regions_.end(),
                              [&](const auto& held) { return held.get() == region; }));
}

void SharedBlock::Part() {
  if (parted_.exchange(true)) return;
  // What is lent for ever is never used again.
  ++lent_;
  region_->memory->KeepFromOthers(offset_, taken_);
}

std::shared_ptr<SharedArena> ArenaLink::Get(absl::Time deadline) {
  MutexLock lock(&mutex_);
  if (arena_ != nullptr && arena_->alive()) return arena_;
  if (std::exchange(arena_, nullptr) != nullptr) next_try_ = absl::InfinitePast();
  if (SteadyNow() < next_try_) return nullptr;
  deadline = std::min(deadline, SteadyNow() + patience_);
  const absl::StatusOr<LocalInvitation> invitation = ask_(deadline);
  if (invitation.ok()) {
    auto arena = SharedArena::Connect(invitation->socket, invitation->ticket, deadline, patience_);
    if (arena.ok()) arena_ = *std::move(arena);
  }
  // One that does not answer may be about to start.
  const bool anew = arena_ != nullptr || absl::IsUnavailable(invitation.status());
  pause_ = anew ? kFirstPause : std::clamp(2 * pause_, kFirstPause, kLongestPause);
  next_try_ = SteadyNow() + pause_;
  return arena_;
}

}  // namespace emberd
