// Calls whose work blocks: they wait in a TaskQueue, under budgets, with the caller's deadline and
// cancellation. PooledCall answers with one message; streams answer with many, and StreamWatch ends
// those whose callers do not take what they are sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/message_lite.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/metrics.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_context.h"
#include "server/rpc/spans.h"
#include "server/rpc/wire.h"

namespace emberd::coordinator {

// Whether a coordinator takes what is new. Its process goes on either way.
// Thread-safe.
class DrainSwitch {
 public:
  bool draining() const { return draining_.load(); }
  void Set(bool draining) { draining_.store(draining); }

 private:
  std::atomic<bool> draining_ = false;
};

// For what is new. Clients that know of another coordinator turn to it on this code.
inline absl::Status DrainingError() {
  return absl::UnavailableError("the coordinator is draining; use another one");
}

// Ends streams that nobody reads: a message that waits keeps memory, and files open.
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

// What the calls of one service share.
struct CallEnvironment {
  TaskQueue* queue = nullptr;
  // What sets queue->max_queued(), for errors.
  absl::string_view waiting_limit = "budgets.max_waiting_requests";
  rpc::Admission* admission = nullptr;
  const DrainSwitch* drain = nullptr;  // null: everything is always taken
  ops::ServerMetrics* metrics = nullptr;
  absl::Duration default_deadline;  // for callers that send none
  absl::Duration slow_call;         // calls that take longer are logged
  StreamWatch* streams = nullptr;   // ends those that nobody reads; null: nothing does
};

// RESOURCE_EXHAUSTED for what finds no room in the environment's queue.
absl::Status QueueFullError(const CallEnvironment& environment);

// One line for a call that took longer than the environment's slow_call.
void LogSlowCall(const CallEnvironment& environment, ops::Rpc rpc, const absl::Status& status,
                 absl::Duration took, absl::string_view trace);

// The deadline of a call: the caller's, or the environment's default.
absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline);

// A unary call. Deletes itself when it is over.
class PooledCall final : public grpc::ServerUnaryReactor {
 public:
  // Fills the response and returns the status. `response_bytes` is for the metrics.
  using Work = std::function<absl::Status(rpc::CallContext* context, int64_t* response_bytes)>;

  static grpc::ServerUnaryReactor* Start(const CallEnvironment& environment,
                                         const grpc::CallbackServerContext& server_context,
                                         ops::Rpc rpc, int64_t request_bytes, Work work);

 private:
  PooledCall(const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
             ops::Rpc rpc, int64_t request_bytes);

  // Takes a place in the queue. UNAVAILABLE: the coordinator is draining. RESOURCE_EXHAUSTED: a
  // budget does not allow it, or the queue is so long that the caller would have given up before
  // the answer.
  absl::Status Enqueue(const std::string& client, Work work);
  void Run(const Work& work);
  // For what the work produces, which stays until the caller has been sent its answer.
  absl::StatusOr<rpc::CallContext::Room> MakeRoom(int64_t bytes, absl::string_view what);
  void End(const absl::Status& status);
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  const ops::Rpc rpc_;
  const int64_t request_bytes_;
  const absl::Time began_ = SteadyNow();
  rpc::CallContext context_;
  rpc::Span span_;
  ops::RpcTimer timer_;
  rpc::Admission::Grant grant_;
  std::vector<rpc::CallContext::Room> rooms_;  // of the thread that works on it
};

// What both kinds of streams have of a call.
struct StreamCall {
  // `limit`: how long it may take for callers without a deadline.
  StreamCall(const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
             ops::Rpc rpc, absl::Duration limit);

  // Takes a place under the budgets. UNAVAILABLE: the coordinator is draining.
  absl::Status Admit();
  // To the environment's queue. RESOURCE_EXHAUSTED: it is full.
  absl::Status Submit(std::function<void()> work);

  const CallEnvironment environment;
  const std::string client;
  rpc::CallContext context;
  ops::RpcTimer timer;
  rpc::Admission::Grant grant;
  StreamWatch::Place watched;
};

// Each message is made when the caller has taken the one before, on the environment's queue: a slow
// caller costs one message, and no thread. Deletes itself when the call is over.
template <typename Message>
class PulledStream final : public grpc::ServerWriteReactor<Message> {
 public:
  // The next message; none: that was all.
  using Next = std::function<absl::StatusOr<std::optional<Message>>()>;
  // What begins the work, on the queue.
  using Open = std::function<absl::StatusOr<Next>(rpc::CallContext* context)>;

  // `limit`: how long the stream may take for callers without a deadline.
  static PulledStream* Start(const CallEnvironment& environment,
                             const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                             absl::Duration limit, Open open) {
    auto* stream = new PulledStream(environment, server_context, rpc, limit, std::move(open));
    const absl::Status status = stream->call_.Admit();
    if (status.ok()) {
      stream->SubmitNext();
    } else {
      stream->End(status);
    }
    return stream;
  }

 private:
  PulledStream(const CallEnvironment& environment,
               const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
               absl::Duration limit, Open open)
      : call_(environment, server_context, rpc, limit), open_(std::move(open)) {}

  void SubmitNext() {
    const absl::Status status = call_.Submit([this] { MakeNext(); });
    if (!status.ok()) End(status);
  }

  void MakeNext() {
    absl::StatusOr<bool> more = Make();
    if (!more.ok() || !*more) {
      End(more.status());
      return;
    }
    call_.watched.BeginSending();
    this->StartWrite(&message_);
  }

  static int64_t BytesOf(const grpc::ByteBuffer& message) {
    return static_cast<int64_t>(message.Length());
  }
  static int64_t BytesOf(const google::protobuf::MessageLite& message) {
    return static_cast<int64_t>(message.ByteSizeLong());
  }

  // Whether there is one more message.
  absl::StatusOr<bool> Make() {
    if (call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (next_ == nullptr) {
      ASSIGN_OR_RETURN(next_, open_(&call_.context));
    }
    ASSIGN_OR_RETURN(std::optional<Message> message, next_());
    if (!message.has_value()) return false;
    const int64_t bytes = BytesOf(*message);
    room_ = nullptr;  // of the one before
    ASSIGN_OR_RETURN(room_, call_.grant.Reserve(bytes, "a part of the answer"));
    message_ = *std::move(message);
    call_.timer.AddResponseBytes(bytes);
    return true;
  }

  void OnWriteDone(bool ok) override {
    call_.watched.EndSending();
    if (ok) {
      SubmitNext();
    } else {
      End(absl::CancelledError("the caller is gone"));
    }
  }

  void End(const absl::Status& status) {
    call_.timer.Finish(status.code());
    room_ = nullptr;
    call_.grant = rpc::Admission::Grant();
    this->Finish(rpc::ToGrpcStatus(status));
  }
  void OnCancel() override { call_.context.Cancel(); }
  void OnDone() override { delete this; }

  StreamCall call_;
  const Open open_;
  // These are touched by one thread at a time.
  Next next_;
  std::shared_ptr<const void> room_;  // for the message
  Message message_;
};

// Of work that blocks, on shards and on files, and that tells how far it is. It never waits for a
// caller who is slow to take what it is sent. Deletes itself when the call is over.
template <typename Response>
class ProgressStream final : public grpc::ServerWriteReactor<Response> {
 public:
  // Sends a message when the caller has taken those before. Of too many that wait, the last is
  // replaced. CANCELLED: the caller is gone.
  using Write = std::function<absl::Status(const Response& message)>;
  using Work = std::function<absl::Status(rpc::CallContext* context, const Write& write)>;

  // `limit`: how long the work may take for callers without a deadline.
  static ProgressStream* Start(const CallEnvironment& environment,
                               const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                               absl::Duration limit, Work work) {
    auto* stream = new ProgressStream(environment, server_context, rpc, limit);
    const absl::Status status = stream->Enqueue(std::move(work));
    if (!status.ok()) stream->End(status);
    return stream;
  }

 private:
  static constexpr size_t kMaxWaiting = 64;

  ProgressStream(const CallEnvironment& environment,
                 const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                 absl::Duration limit)
      : call_(environment, server_context, rpc, limit) {}

  absl::Status Enqueue(Work work) {
    RETURN_IF_ERROR(call_.Admit());
    return call_.Submit([this, work = std::move(work)] {
      End(work(&call_.context, [this](const Response& message) { return Send(message); }));
    });
  }

  absl::Status Send(const Response& message) {
    MutexLock lock(&mutex_);
    if (gone_ || call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (waiting_.size() == kMaxWaiting) waiting_.pop_back();
    waiting_.push_back(message);
    if (!writing_) WriteNext();
    return absl::OkStatus();
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    message_ = std::move(waiting_.front());
    waiting_.pop_front();
    call_.timer.AddResponseBytes(static_cast<int64_t>(message_.ByteSizeLong()));
    call_.watched.BeginSending();
    this->StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      call_.watched.EndSending();
      writing_ = false;
      gone_ = gone_ || !ok;
      if (!gone_ && !waiting_.empty()) {
        WriteNext();
        return;
      }
      if (!end_.has_value()) return;
      end = *end_;
    }
    this->Finish(rpc::ToGrpcStatus(end));
  }

  void End(const absl::Status& status) {
    call_.grant = rpc::Admission::Grant();
    call_.timer.Finish(status.code());
    {
      MutexLock lock(&mutex_);
      end_ = status;
      if (writing_) return;  // after what is on its way
    }
    this->Finish(rpc::ToGrpcStatus(status));
  }
  void OnCancel() override { call_.context.Cancel(); }
  void OnDone() override { delete this; }

  StreamCall call_;
  Mutex mutex_;
  Response message_ ABSL_GUARDED_BY(mutex_);
  std::deque<Response> waiting_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace emberd::coordinator
