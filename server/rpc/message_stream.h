// Both ends of a stream of long messages (message.h) over gRPC's callback API.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message.h"

namespace emberd::rpc {

// The server's end of one call. A subclass gets one message at a time and answers each with Send or
// Close, at once or later from any thread; until then the object stays alive. It deletes itself
// when the call is over.
class ServerMessageStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit ServerMessageStream(const MessageLimits& limits) : assembler_(limits) {}

 protected:
  // Must be called once by the subclass when it is ready for the first message.
  void Begin() { StartRead(&incoming_); }

  // A whole message is there. Runs on a gRPC thread: must not block.
  virtual void OnMessage(IncomingMessage message) = 0;
  // The peer ended or broke the stream while a message was awaited. Must call Close.
  virtual void OnPeerGone() {
    Close(absl::CancelledError("the caller ended the stream before its message"));
  }

  // Writes a message, then waits for the peer's next one.
  void Send(OutgoingMessage message) { Write(std::move(message), /*last=*/false); }
  // Writes a message, then ends the call with OK.
  void SendLast(OutgoingMessage message) { Write(std::move(message), /*last=*/true); }
  // Ends the call.
  void Close(const absl::Status& status);

  bool peer_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  void Write(OutgoingMessage message, bool last);
  void WriteNextPart();
  void OnReadDone(bool ok) final;
  void OnWriteDone(bool ok) final;
  void OnCancel() final { cancelled_.store(true, std::memory_order_relaxed); }
  void OnDone() final { delete this; }

  // Reads, work and writes take turns, so one thread at a time uses these.
  MessageAssembler assembler_;
  grpc::ByteBuffer incoming_;
  std::deque<grpc::ByteBuffer> outgoing_;
  bool close_after_write_ = false;
  std::atomic<bool> cancelled_ = false;
};

// Where the calls of ClientMessageStream go. Thread-safe.
class MessageChannel {
 public:
  explicit MessageChannel(const std::shared_ptr<grpc::Channel>& channel)
      : channel_(channel), stub_(channel) {}
  // Waits until all calls are over, also those whose streams are gone. Otherwise the last call
  // would delete the channel, on one of the threads that this deletion waits for.
  ~MessageChannel();

 private:
  friend class ClientMessageCall;

  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  absl::Mutex mutex_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What ClientMessageStream shares with gRPC's threads. Deletes itself when it has been released
// and the call is over.
class ClientMessageCall : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ClientMessageCall(MessageChannel* channel, const MessageLimits& limits);
  void Start(const std::string& method, const CallContext& context);
  void Cancel() { client_context_.TryCancel(); }
  // Cancels it if it is not over. The last use.
  void Release();

  void Send(OutgoingMessage message);
  absl::StatusOr<IncomingMessage> Receive();

 private:
  ~ClientMessageCall() override = default;
  void Delete();
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  MessageChannel* const channel_;
  grpc::ClientContext client_context_;
  MessageAssembler assembler_;  // used by OnReadDone alone
  grpc::ByteBuffer incoming_;

  absl::Mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::deque<IncomingMessage> inbox_ ABSL_GUARDED_BY(mutex_);
  absl::Status local_error_ ABSL_GUARDED_BY(mutex_);  // what we found wrong with the peer's message
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // no more writes
  bool reads_over_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = true;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> final_status_ ABSL_GUARDED_BY(mutex_);
};

// The client's end of one call, used by one thread that may block.
class ClientMessageStream {
 public:
  // Opens a call of `method` ("/package.Service/Method"); nothing is sent before the first message.
  // Ends with the context's deadline or cancellation at the latest. `channel` and `context` must
  // outlive the stream.
  ClientMessageStream(MessageChannel* channel, const std::string& method, CallContext* context,
                      const MessageLimits& limits);
  // Cancels the call if it is not over, and does not wait for that.
  ~ClientMessageStream();
  ClientMessageStream(const ClientMessageStream&) = delete;
  ClientMessageStream& operator=(const ClientMessageStream&) = delete;

  // Queues a message. Does not block.
  void Send(OutgoingMessage message) { call_->Send(std::move(message)); }
  // Waits for the next message, or for the end of the call: then its status (INTERNAL if that was
  // OK).
  absl::StatusOr<IncomingMessage> Receive() { return call_->Receive(); }

 private:
  ClientMessageCall* const call_;
  std::optional<CancelWatch> watch_;
};

}  // namespace emberd::rpc
