// Long messages between processes: a header message and a payload, cut into message parts of about
// 1 MiB (emberd.internal.v1.MessagePart) so that sending, receiving and computing overlap. Streams
// of them: message_stream.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/arena.h>
#include <google/protobuf/message_lite.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/rpc/wire.h"
#include "server/rpc/budgets.h"

namespace google::protobuf::io {
class CodedInputStream;
}  // namespace google::protobuf::io
namespace grpc {
class ByteBuffer;
}  // namespace grpc

namespace emberd::rpc {

// Bytes of payload in one part: large enough to amortise a message, small enough to overlap (any
// size between 0.5 and 2 MiB does as well).
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

// What one end of a stream may receive.
struct MessageLimits {
  int64_t max_bytes = 0;  // of one message: budgets.max_message_bytes
  // A message takes its bytes from it when its size is known, and gives them back with the last
  // reference to its payload. Small ones take none, so that a decision gets through in any case.
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

 private:
  absl::StatusOr<std::optional<IncomingMessage>> Add(google::protobuf::io::CodedInputStream* input);
  absl::Status AddPayload(google::protobuf::io::CodedInputStream* input);

  const MessageLimits limits_;
  bool started_ = false;
  size_t filled_ = 0;
  IncomingMessage message_;
};

// The message of a single part, as JoinMessage makes it.
absl::StatusOr<IncomingMessage> ReadJoined(absl::string_view part, const MessageLimits& limits);

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

// A protobuf message of many small parts, whose memory is taken and given back in one go.
template <typename Message>
class ArenaMessage {
 public:
  ArenaMessage() : arena_(block_, sizeof(block_)) {
    message_ = google::protobuf::Arena::CreateMessage<Message>(&arena_);
  }

  // Lives as long as this does.
  Message& operator*() { return *message_; }
  Message* operator->() { return message_; }

 private:
  static constexpr size_t kBlockBytes = size_t{8} << 10;  // holds a small message

  alignas(std::max_align_t) char block_[kBlockBytes];
  google::protobuf::Arena arena_;
  Message* message_;
};

}  // namespace emberd::rpc
