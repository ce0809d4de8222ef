// The order in which changes reach the rows of a shard.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace emberd::server {

// One lock for updates of trainers, steps of groups and assignments alike. Under it a change gets
// its number, is marked as made, and is handed to the engine: who looks under the lock sees all
// three or none of them.
struct Sequencer {
  Mutex mutex;
  uint64_t changes ABSL_GUARDED_BY(mutex) = 0;  // handed to the engine so far
};

}  // namespace emberd::server
