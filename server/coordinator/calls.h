// Calls whose work blocks: they wait in a TaskQueue, under budgets, with the caller's deadline and
// cancellation. A pooled call answers with one message; streams answer with many, and StreamWatch
// ends those whose callers do not take what they are sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "server/ops/metrics.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {

// For what is new while a coordinator drains. Clients that know of another one turn to it on this
// code.
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
    // Whether a message, or the end of the stream, waits for the caller from now on.
    void SetSending(bool sending);

   private:
    friend class StreamWatch;
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
  const std::atomic<bool>* draining = nullptr;  // nothing new is taken; null: everything always is
  ops::ServerMetrics* metrics = nullptr;
  absl::Duration default_deadline;  // for callers that send none
  absl::Duration slow_call;         // calls that take longer are logged
  StreamWatch* streams = nullptr;   // ends those that nobody reads; null: nothing does
};

// What each call has, whichever way it came.
struct Call {
  // `trace`: see rpc::TraceOf.
  Call(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline, std::string trace,
       int64_t request_bytes = 0);

  // Takes a place under the budgets. UNAVAILABLE: the coordinator is draining.
  absl::Status Admit(const std::string& client);

  const CallEnvironment environment;
  const ops::Rpc method;
  const int64_t request_bytes;
  rpc::CallContext context;
  ops::RpcTimer timer;
  rpc::Admission::Grant grant;
};

// A call that is answered with one message.
struct UnaryCall : Call {
  // `sent_trace`: see rpc::SentTrace.
  UnaryCall(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline,
            absl::string_view sent_trace, int64_t request_bytes);

  // Tells metrics and spans, and the log if it took longer than the environment's slow_call.
  void End(const absl::Status& status);

  const absl::Time began = SteadyNow();
  rpc::Span span;
  // For what the work produces, which stays until the caller has been sent its answer. Of the
  // thread that works on it.
  std::vector<rpc::CallContext::Room> rooms;
};

// Begins a unary call. `work` fills the response and returns the status; `response_bytes` is for
// the metrics.
using PooledWork = std::function<absl::Status(rpc::CallContext* context, int64_t* response_bytes)>;
grpc::ServerUnaryReactor* StartPooledCall(const CallEnvironment& environment,
                                          const grpc::CallbackServerContext& server_context,
                                          ops::Rpc method, int64_t request_bytes, PooledWork work);

// Begins a stream. Each message is made when the caller has taken the one before, on the
// environment's queue: a slow caller costs one message, and no thread. `open` begins the work, on
// the queue, too. `limit`: how long it may take for callers without a deadline.
using NextMessage = std::function<absl::StatusOr<std::optional<grpc::ByteBuffer>>()>;  // none: end
using OpenStream = std::function<absl::StatusOr<NextMessage>(rpc::CallContext* context)>;
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartPulledStream(
    const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
    ops::Rpc method, absl::Duration limit, OpenStream open);

// The same of work that blocks, on shards and on files, and that tells how far it is. It never
// waits for a caller who is slow to take what it is sent: of too many messages that wait, the last
// is replaced. Writing is CANCELLED if the caller is gone.
using WriteMessage = std::function<absl::Status(grpc::ByteBuffer message)>;
using ProgressWork =
    std::function<absl::Status(rpc::CallContext* context, const WriteMessage& write)>;
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartProgressStream(
    const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
    ops::Rpc method, absl::Duration limit, ProgressWork work);

}  // namespace emberd::coordinator
