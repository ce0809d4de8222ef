// One call whose work blocks, on shards and on files, and that tells how far it is. It never waits
// for a caller who is slow to take what it is sent.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/stream_watch.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {

// Deletes itself when the call is over.
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
    const absl::Status status =
        stream->Enqueue(security::ClientName(server_context), std::move(work));
    if (!status.ok()) stream->End(status);
    return stream;
  }

 private:
  static constexpr size_t kMaxWaiting = 64;

  ProgressStream(const CallEnvironment& environment,
                 const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                 absl::Duration limit)
      : environment_(environment),
        context_(DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
        timer_(environment.metrics, rpc),
        watched_(environment.streams, &server_context) {}

  absl::Status Enqueue(const std::string& client, Work work) {
    ASSIGN_OR_RETURN(grant_, environment_.admission->Admit(client, 0));
    if (environment_.drain != nullptr && environment_.drain->draining()) return DrainingError();
    const bool taken = environment_.queue->Submit([this, work = std::move(work)] {
      End(work(&context_, [this](const Response& message) { return Send(message); }));
    });
    return taken ? absl::OkStatus() : QueueFullError(environment_);
  }

  absl::Status Send(const Response& message) {
    MutexLock lock(&mutex_);
    if (gone_ || context_.cancelled()) return absl::CancelledError("the caller is gone");
    if (waiting_.size() == kMaxWaiting) waiting_.pop_back();
    waiting_.push_back(message);
    if (!writing_) WriteNext();
    return absl::OkStatus();
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    message_ = std::move(waiting_.front());
    waiting_.pop_front();
    timer_.AddResponseBytes(static_cast<int64_t>(message_.ByteSizeLong()));
    watched_.BeginSending();
    this->StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      watched_.EndSending();
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
    grant_ = Admission::Grant();
    timer_.Finish(status.code());
    {
      MutexLock lock(&mutex_);
      end_ = status;
      if (writing_) return;  // after what is on its way
    }
    this->Finish(rpc::ToGrpcStatus(status));
  }
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  rpc::CallContext context_;
  ops::RpcTimer timer_;
  Admission::Grant grant_;
  StreamWatch::Place watched_;
  Mutex mutex_;
  Response message_ ABSL_GUARDED_BY(mutex_);
  std::deque<Response> waiting_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace emberd::server
