// An arena that is there as long as its server is: see SharedArena.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/region_server.h"
#include "base/shared_arena.h"

namespace emberd {

// Thread-safe.
class ArenaLink {
 public:
  // Asks the server where to connect.
  using Ask = std::function<absl::StatusOr<RegionServer::Invitation>()>;
  explicit ArenaLink(Ask ask) : ask_(std::move(ask)) {}

  // Null where there is none: the server is on another machine, or does not want to share. May wait
  // for its answer, once, and again when it has been restarted.
  std::shared_ptr<SharedArena> Get();

 private:
  const Ask ask_;
  Mutex mutex_;
  std::shared_ptr<SharedArena> arena_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);  // before next_try_
};

}  // namespace emberd
