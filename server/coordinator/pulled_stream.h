// One call that answers with a stream of messages, each of which is made when the caller has taken
// the one before: a slow caller costs one message, and no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <google/protobuf/message_lite.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/stream_watch.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {

// Deletes itself when the call is over. Messages are made one after another, on the environment's
// queue.
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
    const absl::Status status = stream->Admit(security::ClientName(server_context));
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
      : environment_(environment),
        open_(std::move(open)),
        context_(DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
        timer_(environment.metrics, rpc),
        watched_(environment.streams, &server_context) {}

  absl::Status Admit(const std::string& client) {
    ASSIGN_OR_RETURN(grant_, environment_.admission->Admit(client, 0));
    const bool draining = environment_.drain != nullptr && environment_.drain->draining();
    return draining ? DrainingError() : absl::OkStatus();
  }

  void SubmitNext() {
    if (!environment_.queue->Submit([this] { MakeNext(); })) End(QueueFullError(environment_));
  }

  void MakeNext() {
    absl::StatusOr<bool> more = Make();
    if (!more.ok() || !*more) {
      End(more.status());
      return;
    }
    watched_.BeginSending();
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
    if (context_.cancelled()) return absl::CancelledError("the caller is gone");
    if (next_ == nullptr) {
      ASSIGN_OR_RETURN(next_, open_(&context_));
    }
    ASSIGN_OR_RETURN(std::optional<Message> message, next_());
    if (!message.has_value()) return false;
    const int64_t bytes = BytesOf(*message);
    room_ = nullptr;  // of the one before
    ASSIGN_OR_RETURN(room_, grant_.Reserve(bytes, "a part of the answer"));
    message_ = *std::move(message);
    timer_.AddResponseBytes(bytes);
    return true;
  }

  void OnWriteDone(bool ok) override {
    watched_.EndSending();
    if (ok) {
      SubmitNext();
    } else {
      End(absl::CancelledError("the caller is gone"));
    }
  }

  void End(const absl::Status& status) {
    timer_.Finish(status.code());
    room_ = nullptr;
    grant_ = Admission::Grant();
    this->Finish(rpc::ToGrpcStatus(status));
  }
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  const CallEnvironment environment_;
  const Open open_;
  rpc::CallContext context_;
  ops::RpcTimer timer_;
  Admission::Grant grant_;
  StreamWatch::Place watched_;
  // These are touched by one thread at a time.
  Next next_;
  std::shared_ptr<const void> room_;  // for the message
  Message message_;
};

}  // namespace emberd::server
