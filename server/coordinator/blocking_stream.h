// One call that answers with a stream of messages, and whose work blocks: on shards, on files, and
// on a caller who is slow to take what it is sent.
#pragma once

#include <functional>
#include <utility>

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "server/coordinator/pooled_call.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {

// Deletes itself when the call is over.
template <typename Response>
class BlockingStream final : public grpc::ServerWriteReactor<Response> {
 public:
  // Sends a message and waits until the next one may be sent. CANCELLED: the caller is gone.
  using Write = std::function<absl::Status(const Response& message)>;
  using Work = std::function<absl::Status(rpc::CallContext* context, const Write& write)>;

  // `limit`: how long the work may take for callers without a deadline.
  static BlockingStream* Start(const CallEnvironment& environment,
                               const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                               absl::Duration limit, Work work) {
    auto* stream = new BlockingStream(environment, server_context, rpc, limit);
    const absl::Status status =
        stream->Enqueue(security::ClientName(server_context), std::move(work));
    if (!status.ok()) stream->End(status);
    return stream;
  }

 private:
  BlockingStream(const CallEnvironment& environment,
                 const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                 absl::Duration limit)
      : environment_(environment),
        context_(DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
        timer_(environment.metrics, rpc) {}

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
    message_ = message;
    writing_ = true;
    timer_.AddResponseBytes(static_cast<int64_t>(message_.ByteSizeLong()));
    this->StartWrite(&message_);
    while (writing_) written_.Wait(&mutex_);
    return gone_ ? absl::CancelledError("the caller is gone") : absl::OkStatus();
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    writing_ = false;
    gone_ = gone_ || !ok;
    written_.SignalAll();
  }

  void End(const absl::Status& status) {
    grant_ = Admission::Grant();
    timer_.Finish(status.code());
    this->Finish(rpc::ToGrpcStatus(status));
  }
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  rpc::CallContext context_;
  ops::RpcTimer timer_;
  Admission::Grant grant_;
  Mutex mutex_;
  CondVar written_;
  Response message_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace emberd::server
