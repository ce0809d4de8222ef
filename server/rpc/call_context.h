// What a request hands down to the calls that it makes: a deadline, its trace, whether it was
// cancelled, and who answers for the memory that it takes; its spans, which show what it spends its
// time on; and Promise, for a thread that waits for the answer of such a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "server/ops/catalogue.h"

namespace grpc {
class ClientContext;
class ServerContextBase;
}  // namespace grpc

namespace emberd::rpc {

// Trace ids (W3C trace context) tie together the log lines of one request on all processes that it
// passes. They travel in the metadata "traceparent".

// The caller's trace context, or a new one if it sent none or nonsense.
std::string TraceOf(const grpc::ServerContextBase& context);
// The same for a call that did not come by gRPC; `sent`: what its caller sent.
std::string TraceOf(absl::string_view sent);
// As the caller sent it, unchecked; empty if it sent none. Lives as long as the call.
absl::string_view SentTrace(const grpc::ServerContextBase& context);
// Sends the trace context along. Does nothing if it is empty.
void SendTrace(absl::string_view trace, grpc::ClientContext* context);
// The id in it, 32 hex digits: what logs show.
absl::string_view TraceId(absl::string_view trace);
// The id of the span in it, 16 hex digits.
absl::string_view SpanId(absl::string_view trace);
// The same trace with a new span in place of its own.
std::string NewSpanOf(absl::string_view trace);

// An id that no process is likely to make again. Never 0.
uint64_t RandomId();

// "00-" 32 hex digits "-" 16 hex digits "-" 2 hex digits, ids not zero.
bool IsTrace(absl::string_view trace);

// Thread-safe. Lives as long as its request.
class CallContext {
 public:
  // `trace`: see TraceOf; sent along with every call, if not empty.
  explicit CallContext(absl::Time deadline, std::string trace = "")
      : deadline_(deadline), trace_(std::move(trace)) {}

  absl::Time deadline() const { return deadline_; }
  std::string trace() const {
    absl::MutexLock lock(&mutex_);
    return trace_;
  }
  // For spans, below.
  void SetTrace(std::string trace) {
    absl::MutexLock lock(&mutex_);
    trace_ = std::move(trace);
  }

  // Takes `bytes` of the budgets for something that the request produces, `what` in errors. They
  // are given back with the last reference to the result; unless `brief`, the call may keep one
  // until it ends. May wait until the caller has taken its earlier answers.
  using Room = std::shared_ptr<const void>;
  using RoomMaker =
      std::function<absl::StatusOr<Room>(int64_t bytes, absl::string_view what, bool brief)>;
  // To be called before MakeRoom, which always succeeds without a maker.
  void SetRoomMaker(RoomMaker maker) { room_maker_ = std::move(maker); }
  absl::StatusOr<Room> MakeRoom(int64_t bytes, absl::string_view what, bool brief = false) const {
    return room_maker_ == nullptr ? Room() : room_maker_(bytes, what, brief);
  }

  bool cancelled() const {
    absl::MutexLock lock(&mutex_);
    return cancelled_;
  }
  absl::Status CheckNotCancelled() const {
    if (!cancelled()) return absl::OkStatus();
    return absl::CancelledError("the caller cancelled the call");
  }

  // Runs every watcher, once.
  void Cancel() {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    for (auto& [id, watcher] : watchers_) watcher();
    watchers_.clear();
  }

 private:
  friend class CancelWatch;

  const absl::Time deadline_;
  RoomMaker room_maker_;
  mutable absl::Mutex mutex_;
  std::string trace_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::function<void()>> watchers_ ABSL_GUARDED_BY(mutex_);
};

// Calls `watcher` when the context is cancelled (at once if it has been), until this object goes.
// The watcher runs under the context's lock: it must be short and must not touch the context.
class CancelWatch {
 public:
  CancelWatch(CallContext* context, std::function<void()> watcher) : context_(context) {
    absl::MutexLock lock(&context_->mutex_);
    if (context_->cancelled_) {
      watcher();
    } else {
      id_ = context_->next_id_++;
      context_->watchers_.emplace(id_, std::move(watcher));
    }
  }
  ~CancelWatch() {
    absl::MutexLock lock(&context_->mutex_);
    context_->watchers_.erase(id_);
  }
  CancelWatch(const CancelWatch&) = delete;
  CancelWatch& operator=(const CancelWatch&) = delete;

 private:
  CallContext* const context_;
  int64_t id_ = -1;
};

// A CallContext for one piece of work of a longer call: the trace and the cancellation of the
// longer call, and at most `limit` of its time.
class LinkedContext {
 public:
  // `parent` must outlive it.
  LinkedContext(CallContext* parent, absl::Duration limit)
      : context_(std::min(parent->deadline(), SteadyNow() + limit), parent->trace()),
        watch_(parent, [this] { context_.Cancel(); }) {}

  CallContext* get() { return &context_; }

 private:
  CallContext context_;
  CancelWatch watch_;
};

// What a callback brings, for a thread that waits for it. T: a Status or StatusOr.
template <typename T>
class Promise {
 public:
  // The callback, to be called once. It may be the last to go.
  std::function<void(T)> Setter() const {
    return [state = state_](T value) {
      state->value = std::move(value);
      state->ready.Notify();
    };
  }
  // False: there is no value by then, by SteadyNow.
  bool WaitUntil(absl::Time deadline) const {
    return AwaitSteadily(state_->ready, deadline - SteadyNow());
  }
  T& Wait() {
    state_->ready.WaitForNotification();
    return state_->value;
  }

 private:
  struct State {
    absl::Notification ready;
    T value = absl::UnknownError("no answer");
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Calls begin(callback), and waits for what the callback gets.
template <typename T, typename Begin>
T WaitForAnswer(const Begin& begin) {
  Promise<T> promise;
  begin(promise.Setter());
  return std::move(promise.Wait());
}

// Spans go to a file that OpenTelemetry's collectors read: one line each, an
// ExportTraceServiceRequest in JSON, which names the span that it is a part of. Without a file,
// they cost nothing.

// To be called once, at the start of a process, which the spans call `process`. With an empty
// `path`, there are no spans. INVALID_ARGUMENT if the file cannot be opened for appending.
absl::Status SetUpSpans(const std::string& path, const std::string& process);
bool SpansAreOn();
// To be called after somebody, such as logrotate, has moved the file of spans: makes a new file
// under its name, and goes on in that. If that fails, spans go on in the old one. Thread-safe.
void ReopenSpans();

// One span, from its creation to its end, on one thread. Spans that are made for the context
// meanwhile, here or in processes that are called, are parts of it. Spans of one context end in
// reverse order.
class Span {
 public:
  enum class Kind { kInternal = 1, kServer = 2 };

  // `context` must outlive it; null: there is no span. `has_parent`: its trace names a span of the
  // caller. `name` must outlive the span.
  Span(CallContext* context, std::string_view name, Kind kind = Kind::kInternal,
       bool has_parent = true, absl::Time began = SteadyNow());
  ~Span() { End(absl::OkStatus()); }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void Set(std::string_view key, std::string_view value);
  void Set(std::string_view key, int64_t value) { Set(key, std::to_string(value)); }
  // Ends it; once.
  void End(const absl::Status& status);

 private:
  CallContext* context_;  // null: there is no span, or it has ended
  std::string_view name_;
  Kind kind_;
  bool has_parent_;
  absl::Time began_;
  std::string parent_;  // the context's trace before this span
  std::vector<std::pair<std::string, std::string>> attributes_;
};

// Times pieces of a shard's own work for a call of a step. Each gets a span under the span that
// `trace` names, and a line in the log if it took longer than `slow`.
class TimedWork {
 public:
  TimedWork(absl::Duration slow, ops::Rpc rpc, std::string trace)
      : slow_(slow), rpc_(rpc), trace_(std::move(trace)) {}

  void Begin() { began_ = SteadyNow(); }
  void End() const;

 private:
  const absl::Duration slow_;
  const ops::Rpc rpc_;
  const std::string trace_;
  absl::Time began_ = SteadyNow();
};

}  // namespace emberd::rpc
