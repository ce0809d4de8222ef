#include "server/coordinator/calls.h"

#include <deque>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "server/ops/logging.h"
#include "server/security/security.h"

namespace emberd::coordinator {
namespace {

using grpc::ByteBuffer;

// What ends a step that a Lookup began.
bool FinishesABatch(ops::Rpc rpc) {
  return rpc == ops::Rpc::kApplyGradients || rpc == ops::Rpc::kReleaseBatch;
}

// What goes on while the coordinator drains: handles are of no use at another one.
bool FinishesWork(ops::Rpc rpc) {
  switch (rpc) {
    case ops::Rpc::kRelease:
    case ops::Rpc::kReadHandle:
    case ops::Rpc::kExecute:  // unless it looks up: see Programs::Run
    case ops::Rpc::kExecuteChained:
      return true;
    default:
      return FinishesABatch(rpc);
  }
}

// Operators look in when there is too much to do, and what a Lookup has cost is lost if its step
// does not end.
bool MayBeShed(ops::Rpc rpc) {
  switch (rpc) {
    case ops::Rpc::kGetStatus:
    case ops::Rpc::kGetLimits:
    case ops::Rpc::kSetLimits:
    case ops::Rpc::kGetMetrics:
    case ops::Rpc::kGetStats:
    case ops::Rpc::kDrain:
    case ops::Rpc::kDropModel:
    case ops::Rpc::kResetModel:
    case ops::Rpc::kDropGroup:
      return false;
    default:
      return !FinishesABatch(rpc);
  }
}

// What is made of the request is as large as the request. Of others, ids and gradients are small
// beside what is made of them.
bool DecodesMuch(ops::Rpc rpc) {
  return rpc == ops::Rpc::kReadRows || rpc == ops::Rpc::kAssignRows;
}

// So few requests are taken whatever they are expected to need: one slow request must not make all
// quick ones look slow.
constexpr int kAlwaysTaken = 8;

// The deadline of a call: the caller's, or so long from now.
absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline) {
  const absl::Time deadline = FromSystemTime(context.deadline());
  return deadline == absl::InfiniteFuture() ? SteadyNow() + default_deadline : deadline;
}

// To the environment's queue. RESOURCE_EXHAUSTED: it is full, or there is no thread.
absl::Status Submit(const CallEnvironment& environment, std::function<void()> work) {
  return environment.queue->Submit(std::move(work), [&] {
    return absl::StrCat(environment.queue->max_queued(), " requests wait already; ",
                        environment.waiting_limit, " allows no more; retry later");
  });
}

// Deletes itself when the call is over.
class PooledCall final : public grpc::ServerUnaryReactor {
 public:
  PooledCall(const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
             ops::Rpc method, int64_t request_bytes)
      : call_(environment, method, DeadlineOf(server_context, environment.default_deadline),
              rpc::SentTrace(server_context), request_bytes) {}

  // Takes a place in the queue. UNAVAILABLE: the coordinator is draining. RESOURCE_EXHAUSTED: a
  // budget does not allow it, or the queue is so long that the caller would have given up before
  // the answer.
  absl::Status Enqueue(const std::string& client, PooledWork work) {
    RETURN_IF_ERROR(call_.Admit(client));
    TaskQueue& queue = *call_.environment.queue;
    // What could not be answered in time is refused at once: it would only delay what can be.
    const absl::Duration patience = call_.context.deadline() - call_.began;
    const absl::Duration expected = queue.ExpectedTime();
    if (MayBeShed(call_.method) && queue.tasks() >= kAlwaysTaken && expected > patience * 3 / 4) {
      return absl::ResourceExhaustedError(absl::StrCat(
          queue.tasks(), " requests are waiting already; after them this one would take ",
          absl::ToInt64Milliseconds(expected), " ms, but its deadline is in ",
          absl::ToInt64Milliseconds(patience), " ms; retry later"));
    }
    return Submit(call_.environment, [this, work = std::move(work)] { End(Run(work)); });
  }
  void End(const absl::Status& status) {
    call_.End(status);
    Finish(rpc::ToGrpcStatus(status));
  }

 private:
  absl::Status Run(const PooledWork& work) {
    if (call_.context.cancelled()) {
      return absl::CancelledError("the caller cancelled the call while it was waiting");
    }
    const absl::Time start = SteadyNow();
    const absl::Duration waited = start - call_.began;
    const absl::Duration left = call_.context.deadline() - start;
    call_.span.Set("emberd.queued_us", absl::ToInt64Microseconds(waited));
    if (left < absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat("the request waited ",
                                                      absl::ToInt64Milliseconds(waited),
                                                      " ms for a thread, until its deadline"));
    }
    // The queue has grown slower than was foreseen.
    TaskQueue& queue = *call_.environment.queue;
    if (MayBeShed(call_.method) && waited > left / 3 && left < queue.ExpectedRunTime()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the request waited ", absl::ToInt64Milliseconds(waited), " ms, and the ",
          absl::ToInt64Milliseconds(left), " ms left until its deadline are too few; retry later"));
    }
    int64_t response_bytes = 0;
    absl::Status status;
    if (DecodesMuch(call_.method)) {
      status = call_.context.MakeRoom(call_.request_bytes, "the decoded request").status();
    }
    if (status.ok()) status = work(&call_.context, &response_bytes);
    queue.RecordDuration(SteadyNow() - start);
    call_.timer.AddResponseBytes(response_bytes);
    return status;
  }
  void OnCancel() override { call_.context.Cancel(); }
  void OnDone() override { delete this; }

  UnaryCall call_;
};

// What both kinds of streams have. Deletes itself when the call is over.
class SendingStream : public grpc::ServerWriteReactor<ByteBuffer> {
 public:
  SendingStream(const CallEnvironment& environment,
                const grpc::CallbackServerContext& server_context, ops::Rpc method,
                absl::Duration limit)
      : call_(environment, method, DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
        watched_(environment.streams, &server_context) {}

 protected:
  void OnCancel() final { call_.context.Cancel(); }
  void OnDone() final { delete this; }

  Call call_;
  StreamWatch::Place watched_;
};

class PulledStream final : public SendingStream {
 public:
  using SendingStream::SendingStream;

  void Begin(const std::string& client, OpenStream open) {
    open_ = std::move(open);
    const absl::Status status = call_.Admit(client);
    if (status.ok()) {
      SubmitNext();
    } else {
      End(status);
    }
  }

 private:
  void SubmitNext() {
    const absl::Status status = Submit(call_.environment, [this] { MakeNext(); });
    if (!status.ok()) End(status);
  }

  void MakeNext() {
    const absl::StatusOr<bool> more = Make();
    if (!more.ok() || !*more) {
      End(more.status());
      return;
    }
    watched_.SetSending(true);
    StartWrite(&message_);
  }

  // Whether there is one more message.
  absl::StatusOr<bool> Make() {
    if (call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (next_ == nullptr) {
      ASSIGN_OR_RETURN(next_, open_(&call_.context));
    }
    ASSIGN_OR_RETURN(std::optional<ByteBuffer> message, next_());
    if (!message.has_value()) return false;
    const auto bytes = static_cast<int64_t>(message->Length());
    room_ = nullptr;  // of the one before
    ASSIGN_OR_RETURN(room_, call_.grant.Reserve(bytes, "a part of the answer"));
    message_ = *std::move(message);
    call_.timer.AddResponseBytes(bytes);
    return true;
  }

  void OnWriteDone(bool ok) override {
    watched_.SetSending(false);
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
    Finish(rpc::ToGrpcStatus(status));
  }

  OpenStream open_;
  // These are touched by one thread at a time.
  NextMessage next_;
  std::shared_ptr<const void> room_;  // for the message
  ByteBuffer message_;
};

class ProgressStream final : public SendingStream {
 public:
  using SendingStream::SendingStream;

  void Begin(const std::string& client, ProgressWork work) {
    absl::Status status = call_.Admit(client);
    if (status.ok()) {
      status = Submit(call_.environment, [this, work = std::move(work)] {
        End(work(&call_.context, [this](ByteBuffer message) { return Send(std::move(message)); }));
      });
    }
    if (!status.ok()) End(status);
  }

 private:
  static constexpr size_t kMaxWaiting = 64;

  // When the caller has taken those before.
  absl::Status Send(ByteBuffer message) {
    MutexLock lock(&mutex_);
    if (gone_ || call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (waiting_.size() == kMaxWaiting) waiting_.pop_back();
    waiting_.push_back(std::move(message));
    if (!writing_) WriteNext();
    return absl::OkStatus();
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    message_ = std::move(waiting_.front());
    waiting_.pop_front();
    call_.timer.AddResponseBytes(static_cast<int64_t>(message_.Length()));
    watched_.SetSending(true);
    StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      watched_.SetSending(false);
      writing_ = false;
      gone_ = gone_ || !ok;
      if (!gone_ && !waiting_.empty()) {
        WriteNext();
        return;
      }
      if (!end_.has_value()) return;
      end = *end_;
    }
    Finish(rpc::ToGrpcStatus(end));
  }

  void End(const absl::Status& status) {
    call_.grant = rpc::Admission::Grant();
    call_.timer.Finish(status.code());
    {
      MutexLock lock(&mutex_);
      end_ = status;
      if (writing_) return;  // after what is on its way
    }
    Finish(rpc::ToGrpcStatus(status));
  }

  Mutex mutex_;
  ByteBuffer message_ ABSL_GUARDED_BY(mutex_);
  std::deque<ByteBuffer> waiting_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

StreamWatch::Place::Place(StreamWatch* watch, const grpc::ServerContextBase* context)
    : watch_(watch), context_(context) {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  watch_->places_.insert(this);
}

StreamWatch::Place::~Place() {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  watch_->places_.erase(this);
}

void StreamWatch::Place::SetSending(bool sending) {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  since_ = sending ? SteadyNow() : absl::InfiniteFuture();
}

void StreamWatch::EndStuck() {
  absl::MutexLock lock(&mutex_);
  const absl::Time latest = SteadyNow() - patience_;
  for (Place* place : places_) {
    if (place->since_ > latest) continue;
    place->since_ = absl::InfiniteFuture();
    place->context_->TryCancel();
  }
}

Call::Call(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline,
           std::string trace, int64_t request_bytes)
    : environment(environment),
      method(method),
      request_bytes(request_bytes),
      context(deadline, std::move(trace)),
      timer(environment.metrics, method, request_bytes) {}

absl::Status Call::Admit(const std::string& client) {
  ASSIGN_OR_RETURN(grant, environment.admission->Admit(client, request_bytes));
  // After it has been counted: an operator who drains sees either no request or a refused one.
  const bool draining = environment.draining != nullptr && environment.draining->load();
  return draining && !FinishesWork(method) ? DrainingError() : absl::OkStatus();
}

UnaryCall::UnaryCall(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline,
                     absl::string_view sent_trace, int64_t request_bytes)
    : Call(environment, method, deadline, rpc::TraceOf(sent_trace), request_bytes),
      span(&context, ops::RpcName(method), rpc::Span::Kind::kServer, rpc::IsTrace(sent_trace),
           began) {
  using Room = rpc::CallContext::Room;
  context.SetRoomMaker(
      [this](int64_t bytes, absl::string_view what, bool brief) -> absl::StatusOr<Room> {
        ASSIGN_OR_RETURN(Room room, grant.Reserve(bytes, what));
        if (!brief) rooms.push_back(room);
        return room;
      });
}

void UnaryCall::End(const absl::Status& status) {
  const absl::Duration took = SteadyNow() - began;
  if (took > environment.slow_call) {
    ops::Log(ops::LogLevel::kWarning, "slow call",
             {{"rpc", ops::RpcName(method)},
              {"code", ops::CodeName(status.code())},
              {"ms", absl::ToInt64Milliseconds(took)},
              {"trace", rpc::TraceId(context.trace())}});
  }
  grant = rpc::Admission::Grant();
  span.End(status);
  timer.Finish(status.code());
}

grpc::ServerUnaryReactor* StartPooledCall(const CallEnvironment& environment,
                                          const grpc::CallbackServerContext& server_context,
                                          ops::Rpc method, int64_t request_bytes, PooledWork work) {
  auto* call = new PooledCall(environment, server_context, method, request_bytes);
  const absl::Status status = call->Enqueue(security::ClientName(server_context), std::move(work));
  if (!status.ok()) call->End(status);
  return call;
}

grpc::ServerWriteReactor<ByteBuffer>* StartPulledStream(
    const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
    ops::Rpc method, absl::Duration limit, OpenStream open) {
  auto* stream = new PulledStream(environment, server_context, method, limit);
  stream->Begin(security::ClientName(server_context), std::move(open));
  return stream;
}

grpc::ServerWriteReactor<ByteBuffer>* StartProgressStream(
    const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
    ops::Rpc method, absl::Duration limit, ProgressWork work) {
  auto* stream = new ProgressStream(environment, server_context, method, limit);
  stream->Begin(security::ClientName(server_context), std::move(work));
  return stream;
}

}  // namespace emberd::coordinator
