#include "server/rpc/long_message.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace emberd::rpc {
namespace {

// Field numbers of emberd.internal.v1.MessagePart.
constexpr int kHeaderField = 1;
constexpr int kPayloadSizeField = 2;
constexpr int kPayloadField = 3;

constexpr size_t kPayloadAlignment = 64;

}  // namespace

OutgoingMessage OutgoingMessage::WithHeader(const google::protobuf::MessageLite& header) {
  OutgoingMessage message;
  message.header = header.SerializeAsString();
  return message;
}

std::deque<grpc::ByteBuffer> SplitMessage(OutgoingMessage message, size_t part_bytes) {
  size_t left = 0;
  for (const SharedBytes& piece : message.payload) left += piece.bytes.size();

  std::deque<grpc::ByteBuffer> parts;
  WireEncoder encoder;
  encoder.BytesField(kHeaderField, message.header);
  encoder.VarintField(kPayloadSizeField, left);
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

absl::StatusOr<std::optional<IncomingMessage>> MessageAssembler::Add(const grpc::ByteBuffer& part) {
  absl::StatusOr<WireCursor> cursor = WireCursor::Over(part);
  if (!cursor.ok()) return cursor.status();
  std::string header;
  while (!cursor->AtEnd()) {
    absl::StatusOr<WireCursor::Tag> tag = cursor->ReadTag();
    if (!tag.ok()) return tag.status();
    absl::Status status;
    if (tag->field == kHeaderField && tag->wire_type == kWireLengthDelimited && !started_) {
      absl::StatusOr<size_t> length = cursor->ReadLength();
      if (!length.ok()) return length.status();
      header.resize(*length);
      status = cursor->Copy(header.data(), *length);
    } else if (tag->field == kPayloadSizeField && tag->wire_type == kWireVarint && !started_) {
      absl::StatusOr<uint64_t> size = cursor->ReadVarint();
      if (!size.ok()) return size.status();
      status = Start(*size);
      message_.header_ = std::move(header);
    } else if (tag->field == kPayloadField && tag->wire_type == kWireLengthDelimited) {
      status = AddPayload(&*cursor);
    } else {
      status = cursor->Skip(tag->wire_type);
    }
    if (!status.ok()) return status;
  }
  if (!started_) {
    return absl::InvalidArgumentError("malformed message: its first part gives no payload_size");
  }
  if (filled_ < message_.size_) return std::nullopt;
  started_ = false;
  return std::exchange(message_, IncomingMessage());
}

absl::Status MessageAssembler::Start(uint64_t payload_size) {
  if (payload_size > static_cast<uint64_t>(max_bytes_)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a message of ", payload_size, " bytes is over budgets.max_message_bytes = ", max_bytes_));
  }
  started_ = true;
  filled_ = 0;
  message_.size_ = payload_size;
  if (payload_size == 0) return absl::OkStatus();
  const size_t rounded =
      (payload_size + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
  auto* memory = static_cast<char*>(std::aligned_alloc(kPayloadAlignment, rounded));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a message of ", payload_size, " bytes"));
  }
  message_.payload_ = std::shared_ptr<char>(memory, std::free);
  return absl::OkStatus();
}

absl::Status MessageAssembler::AddPayload(WireCursor* cursor) {
  absl::StatusOr<size_t> length = cursor->ReadLength();
  if (!length.ok()) return length.status();
  if (!started_ || *length > message_.size_ - filled_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "malformed message: more payload than payload_size = ", started_ ? message_.size_ : 0));
  }
  absl::Status status = cursor->Copy(message_.payload_.get() + filled_, *length);
  filled_ += *length;
  return status;
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
  absl::StatusOr<const char*> data = Take(count, what);
  if (!data.ok()) return data.status();
  return absl::Span<const int32_t>(reinterpret_cast<const int32_t*>(*data), count);
}

absl::StatusOr<absl::Span<const float>> PayloadReader::Floats(int64_t count,
                                                              absl::string_view what) {
  absl::StatusOr<const char*> data = Take(count, what);
  if (!data.ok()) return data.status();
  return absl::Span<const float>(reinterpret_cast<const float*>(*data), count);
}

absl::StatusOr<absl::Span<const char>> PayloadReader::Bytes(int64_t count, absl::string_view what) {
  if (count % 4 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", count, " bytes; a multiple of 4"));
  }
  absl::StatusOr<const char*> data = Take(count / 4, what);
  if (!data.ok()) return data.status();
  return absl::MakeConstSpan(*data, count);
}

absl::Status PayloadReader::Finish() const {
  if (rest_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("payload: ", rest_.size(), " bytes more than its header describes"));
}

}  // namespace emberd::rpc
