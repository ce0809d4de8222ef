// Ends streams whose callers do not take what they are sent: a message that waits keeps memory, and
// files open.
#pragma once

#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::server {

// Thread-safe. Outlives its streams.
class StreamWatch {
 public:
  explicit StreamWatch(absl::Duration patience) : patience_(patience) {}

  // What one stream has of the watch, from its begin to its end.
  class Place {
   public:
    // `watch` may be null: then nobody watches.
    Place(StreamWatch* watch, const grpc::ServerContextBase* context);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // Between them a message, or the end of the stream, waits for the caller.
    void BeginSending();
    void EndSending();

   private:
    friend class StreamWatch;
    void Set(absl::Time since);
    StreamWatch* const watch_;
    const grpc::ServerContextBase* const context_;
    absl::Time since_ = absl::InfiniteFuture();  // guarded by the watch's mutex
  };

  // Cancels the calls whose message has waited for longer than the patience.
  void EndStuck();

 private:
  const absl::Duration patience_;
  absl::Mutex mutex_;
  std::set<Place*> places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
