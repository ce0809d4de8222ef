#include "server/rpc/message.h"

#include <algorithm>
#include <cstdlib>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::rpc {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Fields of emberd.internal.v1.MessagePart.
constexpr int kHeaderField = 1;
constexpr int kPayloadSizeField = 2;
constexpr int kPayloadField = 3;
constexpr uint32_t kHeaderTag =
    WireFormatLite::MakeTag(kHeaderField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kPayloadSizeTag =
    WireFormatLite::MakeTag(kPayloadSizeField, WireFormatLite::WIRETYPE_VARINT);
constexpr uint32_t kPayloadTag =
    WireFormatLite::MakeTag(kPayloadField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);

constexpr size_t kPayloadAlignment = 64;

// A message of up to this size is not counted: the call that brings it takes more.
constexpr size_t kSmallMessage = 4096;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: ", what));
}

// What stands before the payload in the first part.
void BeginMessage(const OutgoingMessage& message, WireEncoder* encoder) {
  encoder->BytesField(kHeaderField, message.header);
  encoder->VarintField(kPayloadSizeField, message.payload_bytes());
}

}  // namespace

OutgoingMessage OutgoingMessage::WithHeader(const google::protobuf::MessageLite& header) {
  OutgoingMessage message;
  message.header = header.SerializeAsString();
  return message;
}

int64_t OutgoingMessage::payload_bytes() const {
  int64_t bytes = 0;
  for (const SharedBytes& piece : payload) bytes += static_cast<int64_t>(piece.bytes.size());
  return bytes;
}

std::deque<grpc::ByteBuffer> SplitMessage(OutgoingMessage message, size_t part_bytes) {
  auto left = static_cast<size_t>(message.payload_bytes());

  std::deque<grpc::ByteBuffer> parts;
  WireEncoder encoder;
  BeginMessage(message, &encoder);
  size_t piece = 0;
  size_t offset = 0;
  do {
    size_t room = std::min(left, part_bytes);
    left -= room;
    if (room > 0) encoder.BeginField(kPayloadField, room);
    while (room > 0) {
      const SharedBytes& from = message.payload[piece];
      const size_t here = std::min(room, from.bytes.size() - offset);
      encoder.Raw(SharedBytes{from.bytes.substr(offset, here), from.owner});
      room -= here;
      offset += here;
      if (offset == from.bytes.size()) {
        ++piece;
        offset = 0;
      }
    }
    parts.push_back(encoder.Finish());
  } while (left > 0);
  return parts;
}

std::string JoinMessage(const OutgoingMessage& message) {
  const int64_t size = message.payload_bytes();
  WireEncoder encoder;
  BeginMessage(message, &encoder);
  if (size > 0) encoder.BeginField(kPayloadField, size);
  for (const SharedBytes& piece : message.payload) encoder.Raw(piece.bytes);
  return encoder.FinishText();
}

absl::StatusOr<IncomingMessage> ReadJoined(absl::string_view part, const MessageLimits& limits) {
  MessageAssembler assembler(limits);
  ASSIGN_OR_RETURN(auto message, assembler.Add(part));
  if (message.has_value()) return *std::move(message);
  return Malformed("it has more than one part");
}

absl::StatusOr<std::optional<IncomingMessage>> MessageAssembler::Add(const grpc::ByteBuffer& part) {
  grpc::ByteBuffer read = part;  // shares the slices
  grpc::ProtoBufferReader reader(&read);
  if (!reader.status().ok()) return Malformed("it cannot be read");
  CodedInputStream input(&reader);
  return Add(&input);
}

absl::StatusOr<std::optional<IncomingMessage>> MessageAssembler::Add(absl::string_view part) {
  CodedInputStream input(reinterpret_cast<const uint8_t*>(part.data()),
                         static_cast<int>(part.size()));
  return Add(&input);
}

absl::StatusOr<std::optional<IncomingMessage>> MessageAssembler::Add(CodedInputStream* input) {
  std::string header;
  while (const uint32_t tag = input->ReadTag()) {
    bool good = true;
    if (tag == kHeaderTag && !started_) {
      good = WireFormatLite::ReadBytes(input, &header);
    } else if (tag == kPayloadSizeTag && !started_) {
      uint64_t size = 0;
      if (!input->ReadVarint64(&size)) return Malformed("it ends inside a field");
      ASSIGN_OR_RETURN(message_.payload_, TakePayload(size, header.size(), limits_));
      message_.size_ = size;
      message_.header_ = std::exchange(header, {});
      started_ = true;
      filled_ = 0;
    } else if (tag == kPayloadTag) {
      RETURN_IF_ERROR(AddPayload(input));
    } else {
      good = WireFormatLite::SkipField(input, tag);
    }
    if (!good) return Malformed("it ends inside a field");
  }
  if (!input->ConsumedEntireMessage()) return Malformed("one of its fields has no valid number");
  if (!started_) return Malformed("its first chunk has no payload_size");
  if (filled_ < message_.size_) return std::nullopt;
  started_ = false;
  return std::exchange(message_, IncomingMessage());
}

absl::StatusOr<std::shared_ptr<char>> TakePayload(uint64_t payload_size, size_t header_size,
                                                  const MessageLimits& limits) {
  if (payload_size > static_cast<uint64_t>(limits.max_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a message of ", payload_size,
                     " bytes is larger than budgets.max_message_bytes = ", limits.max_bytes));
  }
  MemoryRoom room;
  const size_t bytes = payload_size + header_size;
  if (bytes > kSmallMessage) {
    ASSIGN_OR_RETURN(room, limits.memory.Take(static_cast<int64_t>(bytes), "a message"));
  }
  if (payload_size == 0) return nullptr;
  const size_t rounded =
      (payload_size + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
  auto* memory = static_cast<char*>(std::aligned_alloc(kPayloadAlignment, rounded));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there is no memory for a message of ", payload_size, " bytes"));
  }
  return std::shared_ptr<char>(memory,
                               [room = std::move(room)](char* payload) { std::free(payload); });
}

absl::Status MessageAssembler::AddPayload(CodedInputStream* input) {
  int length = 0;
  if (!input->ReadVarintSizeAsInt(&length)) return Malformed("it ends inside a field");
  const auto size = static_cast<size_t>(length);
  if (!started_ || size > message_.size_ - filled_) {
    return Malformed(
        absl::StrCat("more payload than payload_size = ", started_ ? message_.size_ : 0));
  }
  if (!input->ReadRaw(message_.payload_.get() + filled_, length)) {
    return Malformed("it ends inside its payload");
  }
  filled_ += size;
  return absl::OkStatus();
}

absl::StatusOr<const char*> PayloadReader::Take(int64_t count, absl::string_view what) {
  if (count < 0 || count > static_cast<int64_t>(rest_.size() / sizeof(int32_t))) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", count, " values do not fit the ",
                                                   rest_.size(),
                                                   " bytes of payload that are left"));
  }
  const char* data = rest_.data();
  rest_.remove_prefix(count * sizeof(int32_t));
  return data;
}

absl::StatusOr<absl::Span<const int32_t>> PayloadReader::Int32s(int64_t count,
                                                                absl::string_view what) {
  ASSIGN_OR_RETURN(const char* data, Take(count, what));
  return absl::Span<const int32_t>(reinterpret_cast<const int32_t*>(data), count);
}

absl::StatusOr<absl::Span<const float>> PayloadReader::Floats(int64_t count,
                                                              absl::string_view what) {
  ASSIGN_OR_RETURN(const char* data, Take(count, what));
  return absl::Span<const float>(reinterpret_cast<const float*>(data), count);
}

absl::StatusOr<absl::Span<const char>> PayloadReader::Bytes(int64_t count, absl::string_view what) {
  if (count % 4 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", count, " bytes; it must be a multiple of 4"));
  }
  ASSIGN_OR_RETURN(const char* data, Take(count / 4, what));
  return absl::MakeConstSpan(data, count);
}

absl::Status PayloadReader::Finish() const {
  if (rest_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("payload: ", rest_.size(), " bytes more than its header describes"));
}

}  // namespace emberd::rpc
