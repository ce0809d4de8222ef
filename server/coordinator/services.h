// The public services of a coordinator. What each call does stands in Coordinator, UnarySteps,
// RowAccess, Checkpoints, Programs and Administration; of training streams, in train/. What a call
// needs beside its work stands here: it waits in a TaskQueue, under budgets, with the caller's
// deadline and cancellation. Most calls answer with one message; streams answer with many, and
// StreamWatch ends those whose callers do not take what they are sent.
#pragma once

#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/lanes.h"
#include "base/steady_time.h"
#include "server/coordinator/resources.h"

namespace grpc {
class ServerContextBase;
class Service;
}  // namespace grpc
namespace emberd {
class LocalServer;
}  // namespace emberd
namespace emberd::ops {
class Samples;
}  // namespace emberd::ops
namespace emberd::security {
class Security;
}  // namespace emberd::security

namespace emberd::coordinator {

class Administration;
class Coordinator;
class Programs;
class TrainStreams;

// Ends streams that nobody reads: a message that waits keeps memory, and files open.
// Thread-safe. Outlives its streams.
class StreamWatch {
 public:
  explicit StreamWatch(absl::Duration patience) : patience_(patience) {}

  // What one stream has of the watch, from its begin to its end.
  class Place {
   public:
    // `watch` may be null: then nobody watches.
    Place(StreamWatch* watch, const grpc::ServerContextBase* context)
        : watch_(watch), context_(context) {
      if (watch_ == nullptr) return;
      absl::MutexLock lock(&watch_->mutex_);
      watch_->places_.insert(this);
    }
    ~Place() {
      if (watch_ == nullptr) return;
      absl::MutexLock lock(&watch_->mutex_);
      watch_->places_.erase(this);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // Whether a message, or the end of the stream, waits for the caller from now on.
    void SetSending(bool sending) {
      if (watch_ == nullptr) return;
      absl::MutexLock lock(&watch_->mutex_);
      since_ = sending ? SteadyNow() : absl::InfiniteFuture();
    }

   private:
    friend class StreamWatch;
    StreamWatch* const watch_;
    const grpc::ServerContextBase* const context_;
    absl::Time since_ = absl::InfiniteFuture();  // guarded by the watch's mutex
  };

  // Cancels the calls whose message has waited for longer than the patience; `standstill`: see
  // TrainStreams::EndSilent.
  void EndStuck(absl::Duration standstill);

 private:
  const absl::Duration patience_;
  absl::Mutex mutex_;
  std::set<Place*> places_ ABSL_GUARDED_BY(mutex_);
};

// What the arguments point to must outlive the services, and the lanes.

// `local`: lets clients in to memory and lanes; null: nobody is.
std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LocalServer* local,
                                                    const CallEnvironment& environment);
std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment);
// `samples` hears how long each call takes that succeeds.
std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment);
std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                Coordinator* coordinator,
                                                const CallEnvironment& environment);

// Small lookups that come over lanes (server/rpc/local_peers.h): each is done on the thread of its
// lane, under the same budgets, checks and statistics as by gRPC, and with the same answer. The
// environment's queue is not used: there are as many threads as lanes. `security` may be null.
LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security);

}  // namespace emberd::coordinator
