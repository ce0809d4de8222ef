#include "server/coordinator/calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::coordinator {
namespace {

// What ends a step that a Lookup began.
bool FinishesABatch(ops::Rpc rpc) {
  return rpc == ops::Rpc::kApplyGradients || rpc == ops::Rpc::kReleaseBatch;
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

}  // namespace

absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline) {
  const absl::Time deadline = FromSystemTime(context.deadline());
  return deadline == absl::InfiniteFuture() ? SteadyNow() + default_deadline : deadline;
}

absl::Status QueueFullError(const CallEnvironment& environment) {
  return absl::ResourceExhaustedError(
      absl::StrCat(environment.queue->max_queued(), " requests wait already; ",
                   environment.waiting_limit, " allows no more; retry later"));
}

void LogSlowCall(const CallEnvironment& environment, ops::Rpc rpc, const absl::Status& status,
                 absl::Duration took, absl::string_view trace) {
  if (took <= environment.slow_call) return;
  ops::Log(ops::LogLevel::kWarning, "slow call",
           {{"rpc", ops::RpcName(rpc)},
            {"code", ops::CodeName(status.code())},
            {"ms", absl::ToInt64Milliseconds(took)},
            {"trace", rpc::TraceId(trace)}});
}

PooledCall::PooledCall(const CallEnvironment& environment,
                       const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                       int64_t request_bytes)
    : environment_(environment),
      rpc_(rpc),
      request_bytes_(request_bytes),
      context_(DeadlineOf(server_context, environment.default_deadline),
               rpc::TraceOf(server_context)),
      span_(&context_, ops::RpcName(rpc), rpc::Span::Kind::kServer, rpc::HasTrace(server_context),
            began_),
      timer_(environment.metrics, rpc, request_bytes) {
  context_.SetRoomMaker(
      [this](int64_t bytes, absl::string_view what) { return MakeRoom(bytes, what); });
}

grpc::ServerUnaryReactor* PooledCall::Start(const CallEnvironment& environment,
                                            const grpc::CallbackServerContext& server_context,
                                            ops::Rpc rpc, int64_t request_bytes, Work work) {
  auto* call = new PooledCall(environment, server_context, rpc, request_bytes);
  absl::Status status = call->Enqueue(security::ClientName(server_context), std::move(work));
  if (!status.ok()) call->End(status);
  return call;
}

absl::Status PooledCall::Enqueue(const std::string& client, Work work) {
  ASSIGN_OR_RETURN(rpc::Admission::Grant grant,
                   environment_.admission->Admit(client, request_bytes_));
  grant_ = std::move(grant);
  // After it has been counted: an operator who drains sees either no request or a refused one.
  if (environment_.drain != nullptr && environment_.drain->draining() && !FinishesABatch(rpc_)) {
    return DrainingError();
  }
  TaskQueue& queue = *environment_.queue;
  // What could not be answered in time is refused at once: it would only delay what can be.
  const absl::Duration patience = context_.deadline() - began_;
  const absl::Duration expected = queue.ExpectedTime();
  if (MayBeShed(rpc_) && queue.tasks() >= kAlwaysTaken && expected > patience * 3 / 4) {
    return absl::ResourceExhaustedError(absl::StrCat(
        queue.tasks(), " requests are waiting already; after them this one would take ",
        absl::ToInt64Milliseconds(expected), " ms, but its deadline is in ",
        absl::ToInt64Milliseconds(patience), " ms; retry later"));
  }
  if (queue.Submit([this, work = std::move(work)] { Run(work); })) return absl::OkStatus();
  return QueueFullError(environment_);
}

void PooledCall::Run(const Work& work) {
  if (context_.cancelled()) {
    End(absl::CancelledError("the caller cancelled the call while it was waiting"));
    return;
  }
  const absl::Time start = SteadyNow();
  span_.Set("emberd.queued_us", absl::ToInt64Microseconds(start - began_));
  if (start > context_.deadline()) {
    End(absl::DeadlineExceededError(absl::StrCat("the request waited ",
                                                 absl::ToInt64Milliseconds(start - began_),
                                                 " ms for a thread, until its deadline")));
    return;
  }
  // The queue has grown slower than was foreseen.
  const absl::Duration waited = start - began_;
  const absl::Duration left = context_.deadline() - start;
  if (MayBeShed(rpc_) && waited > left / 3 && left < environment_.queue->ExpectedRunTime()) {
    End(absl::ResourceExhaustedError(absl::StrCat(
        "the request waited ", absl::ToInt64Milliseconds(waited), " ms, and the ",
        absl::ToInt64Milliseconds(left), " ms left until its deadline are too few; retry later")));
    return;
  }
  int64_t response_bytes = 0;
  absl::Status status;
  if (DecodesMuch(rpc_)) status = MakeRoom(request_bytes_, "the decoded request").status();
  if (status.ok()) status = work(&context_, &response_bytes);
  environment_.queue->RecordDuration(SteadyNow() - start);
  timer_.AddResponseBytes(response_bytes);
  End(status);
}

absl::StatusOr<rpc::CallContext::Room> PooledCall::MakeRoom(int64_t bytes, absl::string_view what) {
  ASSIGN_OR_RETURN(rpc::CallContext::Room room, grant_.Reserve(bytes, what));
  rooms_.push_back(room);
  return room;
}

void PooledCall::End(const absl::Status& status) {
  LogSlowCall(environment_, rpc_, status, SteadyNow() - began_, context_.trace());
  grant_ = rpc::Admission::Grant();
  span_.End(status);
  timer_.Finish(status.code());
  Finish(rpc::ToGrpcStatus(status));
}

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

void StreamWatch::Place::BeginSending() { Set(SteadyNow()); }
void StreamWatch::Place::EndSending() { Set(absl::InfiniteFuture()); }

void StreamWatch::Place::Set(absl::Time since) {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  since_ = since;
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

StreamCall::StreamCall(const CallEnvironment& environment,
                       const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                       absl::Duration limit)
    : environment(environment),
      client(security::ClientName(server_context)),
      context(DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
      timer(environment.metrics, rpc),
      watched(environment.streams, &server_context) {}

absl::Status StreamCall::Admit() {
  ASSIGN_OR_RETURN(grant, environment.admission->Admit(client, 0));
  const bool draining = environment.drain != nullptr && environment.drain->draining();
  return draining ? DrainingError() : absl::OkStatus();
}

absl::Status StreamCall::Submit(std::function<void()> work) {
  if (environment.queue->Submit(std::move(work))) return absl::OkStatus();
  return QueueFullError(environment);
}

}  // namespace emberd::coordinator
