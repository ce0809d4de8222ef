// EmbeddingService.Train: the transport of a TrainSession. Requests are read as they come, lookups
// and updates run on a thread each, answers go out in the order of the requests. A trainer that
// does not take its answers is held back: its next lookups wait, and then its requests are not
// read.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/thread_pools.h"
#include "server/coordinator/resources.h"
#include "server/coordinator/train/train_session.h"
#include "server/ops/metrics.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"
#include "server/step/request_reader.h"

namespace emberd::coordinator {

class TrainStreams;

class TrainStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  TrainStream(TrainStreams* streams, const CoordinatorResources* resources,
              const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
              rpc::Admission::Grant grant);
  // Begins to read.
  void Begin() { StartRead(&incoming_); }
  // Takes no more requests; what is not answered fails with `status`, and the stream ends with it.
  void Stop(const absl::Status& status);
  // While draining, no step begins, and the stream ends when all that have begun are done. A step
  // begins when its lookup is taken, and is done when its update has been answered.
  void SetDraining(bool draining);
  // Ends the stream with DEADLINE_EXCEEDED if the trainer has neither sent nor taken anything for
  // so long, and no request of it is being worked on. `standstill`: see TrainStreams.
  void EndIfSilent(absl::Duration silence, absl::Duration standstill);

 private:
  // A request in its place in the order of answers.
  struct Work {
    int64_t place = 0;
    step::TrainStepRequest request;
  };
  using Messages = std::deque<grpc::ByteBuffer>;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Of one message; an error ends the stream.
  absl::Status Take(const grpc::ByteBuffer& bytes);
  absl::Status TakeStart(v1::TrainStart start);
  absl::Status TakeRequest(step::TrainStepRequest request);

  // A lookup that comes while draining.
  absl::Status RefuseLookup() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the stream if it is drained, as WriteDue does.
  std::optional<absl::Status> EndIfDrained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The two threads.
  void RunLookups(const v1::TrainStart& start);
  void RunUpdates();
  // The next of `queue`, or nothing when no more will come.
  std::optional<Work> Next(std::deque<Work>* queue);
  // Waits until the trainer has taken enough of its answers. See CallContext.
  absl::StatusOr<rpc::CallContext::Room> MakeRoom(int64_t bytes, absl::string_view what);
  void WorkerDone();
  // The trainer has half-closed the stream, and all that it had sent is answered.
  bool AtEnd() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return end_place_ == write_place_ && !writing_ && !finished_;
  }

  // The answer of a place: messages, or the status that ends the stream there.
  void Deliver(int64_t place, absl::StatusOr<Messages> answer, bool of_lookup = false);
  // Ends the stream at a place, if nothing that came before has done so.
  void EndAt(int64_t place, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The answer that is due has been taken as a whole.
  void AnswerTaken() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reads the next message, now or when enough requests have been answered.
  void ReadOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes what is due. A status: the stream ends now, with it.
  std::optional<absl::Status> WriteDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the call; only with what WriteDue returned, or after setting finished_.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Called by the reactor and both threads when they are done with this object; the last deletes
  // it.
  void Unref();

  TrainStreams* const streams_;
  const CoordinatorResources* const resources_;
  const CallEnvironment environment_;
  const grpc::CallbackServerContext* const server_context_;  // there until OnDone
  ops::RpcTimer timer_;
  rpc::CallContext context_;

  grpc::ByteBuffer incoming_;       // belongs to the read in progress
  step::TrainAssembler assembler_;  // used by reads alone
  bool begun_ = false;              // the same

  absl::Mutex mutex_;
  std::unique_ptr<TrainSession> session_ ABSL_GUARDED_BY(mutex_);
  bool no_more_ ABSL_GUARDED_BY(mutex_) = false;    // requests are taken
  int64_t next_place_ ABSL_GUARDED_BY(mutex_) = 1;  // 0 is that of the start
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t open_steps_ ABSL_GUARDED_BY(mutex_) = 0;       // begun and not done
  int64_t pending_updates_ ABSL_GUARDED_BY(mutex_) = 0;  // taken and not answered
  // Of the first lookup that was refused while earlier steps went on: the stream ends there, after
  // them.
  std::optional<int64_t> refused_place_ ABSL_GUARDED_BY(mutex_);
  std::deque<Work> lookups_ ABSL_GUARDED_BY(mutex_);
  std::deque<Work> updates_ ABSL_GUARDED_BY(mutex_);
  rpc::Admission::Grant grant_ ABSL_GUARDED_BY(mutex_);  // with the bytes of requests in work
  int workers_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_start_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_waits_ ABSL_GUARDED_BY(mutex_) = false;  // for answers to be taken
  // Requests, and the start, that are being worked on: what the trainer waits for.
  int working_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time last_sign_ ABSL_GUARDED_BY(mutex_);  // of the trainer, or of work for it

  // By place: messages, or the status that ends the stream there.
  std::map<int64_t, absl::StatusOr<Messages>> answers_ ABSL_GUARDED_BY(mutex_);
  std::set<int64_t> untaken_lookups_ ABSL_GUARDED_BY(mutex_);  // places
  std::optional<int64_t> end_place_ ABSL_GUARDED_BY(mutex_);   // where the trainer half-closed
  int64_t write_place_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // the call is over
  int references_ ABSL_GUARDED_BY(mutex_) = 1;
};

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
  // Ends those that only wait for their trainer, if it has been silent for too long. To be called
  // often, with the time in which this process stood still since the last call.
  void EndSilent(absl::Duration standstill);
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

}  // namespace emberd::coordinator
