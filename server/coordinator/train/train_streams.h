// The training streams of a coordinator: how many there may be, and what ends all of them.
#pragma once

#include <set>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"

namespace emberd::server {

class TrainStream;

// The training streams of a coordinator. Thread-safe; must outlive them, that is, the server.
class TrainStreams {
 public:
  struct Limits {
    int max_streams = 0;     // at once; each has two threads
    absl::Duration silence;  // timeouts.silent_stream_ms
  };
  // `resources`, `threads` and what `environment` points to must outlive it.
  TrainStreams(const CoordinatorResources* resources, const CallEnvironment& environment,
               BlockingPool* threads, const Limits& limits);

  // Makes the stream of a new call. It deletes itself when the call is over.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      const grpc::CallbackServerContext& server_context);
  // Ends all streams after the requests that they have taken, and all that come later at once.
  void Stop();
  // While draining, streams end with UNAVAILABLE between two steps, and new ones at once.
  void SetDraining(bool draining);
  // Ends those that wait for a trainer who has been silent for too long. To be called often.
  void EndSilent();
  // Those that have begun and are not over.
  int count() const;
  // Waits until there are none, for at most `limit`.
  void AwaitNone(absl::Duration limit) const;

 private:
  friend class TrainStream;
  void Remove(TrainStream* stream);

  const CoordinatorResources* const resources_;
  const CallEnvironment environment_;
  const Limits limits_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<TrainStream*> streams_ ABSL_GUARDED_BY(mutex_);
  TaskQueue workers_;  // last: its destructor waits for work that uses the rest
};

}  // namespace emberd::server
