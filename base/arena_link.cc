#include "base/arena_link.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

// A server on another machine stays there, so that it is asked less and less often. But one that is
// being restarted may fail in any way, and share in the next moment.
constexpr absl::Duration kFirstPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(30);

}  // namespace

std::shared_ptr<SharedArena> ArenaLink::Get() {
  MutexLock lock(&mutex_);
  if (arena_ != nullptr && arena_->alive()) return arena_;
  if (std::exchange(arena_, nullptr) != nullptr) next_try_ = absl::InfinitePast();
  if (SteadyNow() < next_try_) return nullptr;
  const absl::StatusOr<RegionServer::Invitation> invitation = ask_();
  if (invitation.ok()) {
    auto arena = SharedArena::Connect(invitation->socket, invitation->ticket);
    if (arena.ok()) arena_ = *std::move(arena);
  }
  // One that does not answer may be about to start.
  const bool anew = arena_ != nullptr || absl::IsUnavailable(invitation.status());
  pause_ = anew ? kFirstPause : std::clamp(2 * pause_, kFirstPause, kLongestPause);
  next_try_ = SteadyNow() + pause_;
  return arena_;
}

}  // namespace emberd
