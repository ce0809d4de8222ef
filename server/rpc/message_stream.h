// Long messages between processes: a header message and a payload, cut into message parts of about
// 1 MiB (emberd.internal.v1.MessagePart) so that sending, receiving and computing overlap; and both
// ends of a stream of them over gRPC's callback API.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/rpc/call_context.h"
#include "server/rpc/memory_budget.h"
#include "server/rpc/wire.h"

namespace emberd::rpc {

// Bytes of payload in one part: large enough to amortise a message, small enough to overlap (limits
// are flat between 0.5 and 2 MiB).
inline constexpr size_t kPartBytes = size_t{1} << 20;

// A message to send: the payload is the concatenation of its pieces, none of which is copied.
struct OutgoingMessage {
  std::string header;  // serialized header message
  std::vector<SharedBytes> payload;

  static OutgoingMessage WithHeader(const google::protobuf::MessageLite& header);
  int64_t payload_bytes() const;
  // Appends an array that `owner` keeps alive.
  template <typename T>
  void Append(absl::Span<const T> values, std::shared_ptr<const void> owner) {
    if (values.empty()) return;
    payload.push_back(
        {absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)),
         std::move(owner)});
  }
};

// The parts of a message, ready to be written one by one. At least one.
std::deque<grpc::ByteBuffer> SplitMessage(OutgoingMessage message, size_t part_bytes = kPartBytes);
// The only part of a small message, copied into one piece.
std::string JoinMessage(const OutgoingMessage& message);

// What both ends of a stream take in.
struct MessageLimits {
  int64_t max_bytes = 0;  // of one message: budgets.max_message_bytes
  // Messages take their bytes from it when their size is known, and give them back with the last
  // reference to their payload. Small ones take none: a decision gets through when all is full.
  MemoryBudget memory = {};
};

// A received message. The payload is contiguous and 64-byte aligned.
class IncomingMessage {
 public:
  const std::string& header() const { return header_; }
  absl::Span<const char> payload() const { return {payload_.get(), size_}; }
  // Keeps the payload alive.
  std::shared_ptr<const void> owner() const { return payload_; }

 private:
  friend class MessageAssembler;
  std::string header_;
  std::shared_ptr<char> payload_;
  size_t size_ = 0;
};

// Memory for the payload of a message, 64-byte aligned; null for none. RESOURCE_EXHAUSTED if the
// limits do not allow it.
absl::StatusOr<std::shared_ptr<char>> TakePayload(uint64_t bytes, size_t header_bytes,
                                                  const MessageLimits& limits);

// Puts the parts of messages together again, one message after another.
class MessageAssembler {
 public:
  // Messages with more payload than the limits allow are refused with RESOURCE_EXHAUSTED before
  // memory is taken.
  explicit MessageAssembler(MessageLimits limits) : limits_(std::move(limits)) {}

  // Takes the next part. Returns the message when this part completed it, nothing when more is to
  // come.
  absl::StatusOr<std::optional<IncomingMessage>> Add(const grpc::ByteBuffer& part);
  // `part` may go afterwards.
  absl::StatusOr<std::optional<IncomingMessage>> Add(absl::string_view part);
  // True between the first and the last part of a message.
  bool in_message() const { return started_; }

 private:
  absl::StatusOr<std::optional<IncomingMessage>> Add(WireCursor cursor);
  absl::Status Start(uint64_t payload_size, size_t header_size);
  absl::Status AddPayload(WireCursor* cursor);

  const MessageLimits limits_;
  bool started_ = false;
  size_t filled_ = 0;
  IncomingMessage message_;
};

// Walks over the arrays in a payload; every array starts where the one before ended.
class PayloadReader {
 public:
  explicit PayloadReader(absl::Span<const char> payload) : rest_(payload) {}

  // The next `count` values of a 4-byte type. INVALID_ARGUMENT if fewer are left; `what` names the
  // array.
  absl::StatusOr<absl::Span<const int32_t>> Int32s(int64_t count, absl::string_view what);
  absl::StatusOr<absl::Span<const float>> Floats(int64_t count, absl::string_view what);
  // The next `count` bytes, a multiple of 4.
  absl::StatusOr<absl::Span<const char>> Bytes(int64_t count, absl::string_view what);
  // INVALID_ARGUMENT if anything is left.
  absl::Status Finish() const;

 private:
  absl::StatusOr<const char*> Take(int64_t count, absl::string_view what);

  absl::Span<const char> rest_;
};

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
  // The peer ended the stream, or broke it, where a message was awaited. Ends with Close.
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

  // Reads, work and writes take turns, so these are touched by one thread at a time.
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
  // Waits until the calls of streams that have gone away are over: the last of them must not be
  // what lets the channel go, on a thread that the channel waits for.
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
  MessageAssembler assembler_;  // touched by OnReadDone alone
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
