#include "server/rpc/wire.h"

#include <cassert>
#include <cstring>
#include <utility>

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::rpc {
namespace {

using google::protobuf::io::CodedOutputStream;

// Below this size a copy is cheaper than a slice of its own.
constexpr size_t kCopyBelow = 512;

absl::Status Truncated(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: it ends inside ", what));
}

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status DecodeMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer reader(bytes);  // shares the slices; decoding empties its argument
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, google::protobuf::Message>(&reader, message)
          .ok()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the request is not a valid ", message->GetTypeName()));
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  // Fails only for messages of 2 GiB and more, which the budgets rule out.
  (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &bytes,
                                                                                   &own_buffer);
  return bytes;
}

size_t LengthDelimitedSize(int field, size_t length) {
  return CodedOutputStream::VarintSize64(static_cast<uint64_t>(field) << 3) +
         CodedOutputStream::VarintSize64(length) + length;
}

WireEncoder::WireEncoder() = default;
WireEncoder::~WireEncoder() = default;

void WireEncoder::Varint(uint64_t value) {
  while (value >= 0x80) {
    scratch_.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  scratch_.push_back(static_cast<char>(value));
}

void WireEncoder::VarintField(int field, uint64_t value) {
  Varint(static_cast<uint64_t>(field) << 3 | kWireVarint);
  Varint(value);
}

void WireEncoder::Fixed64Field(int field, uint64_t value) {
  Varint(static_cast<uint64_t>(field) << 3 | kWireFixed64);
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));  // the machine is little-endian, as the wire is
  scratch_.append(bytes, sizeof(bytes));
}

void WireEncoder::BeginField(int field, size_t length) {
  Varint(static_cast<uint64_t>(field) << 3 | kWireLengthDelimited);
  Varint(length);
}

void WireEncoder::BytesField(int field, absl::string_view value) {
  BeginField(field, value.size());
  Raw(value);
}

void WireEncoder::Raw(absl::string_view bytes) { scratch_.append(bytes.data(), bytes.size()); }

void WireEncoder::Raw(SharedBytes bytes) {
  if (bytes.bytes.size() < kCopyBelow) {
    Raw(bytes.bytes);
    return;
  }
  Flush();
  auto* owner = new std::shared_ptr<const void>(std::move(bytes.owner));
  slices_.emplace_back(const_cast<char*>(bytes.bytes.data()), bytes.bytes.size(), ReleaseOwner,
                       owner);
}

void WireEncoder::Flush() {
  if (scratch_.empty()) return;
  slices_.emplace_back(scratch_);
  scratch_.clear();
}

grpc::ByteBuffer WireEncoder::Finish() {
  Flush();
  if (slices_.empty()) slices_.emplace_back(std::string());
  grpc::ByteBuffer buffer(slices_.data(), slices_.size());
  slices_.clear();
  return buffer;
}

std::string WireEncoder::FinishText() {
  assert(slices_.empty());
  return std::exchange(scratch_, {});
}

WireCursor WireCursor::Over(absl::string_view bytes) {
  WireCursor cursor;
  cursor.slices_ = std::make_shared<std::vector<grpc::Slice>>();
  cursor.slices_->emplace_back(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
  cursor.remaining_ = bytes.size();
  return cursor;
}

absl::StatusOr<WireCursor> WireCursor::Over(const grpc::ByteBuffer& buffer) {
  WireCursor cursor;
  cursor.slices_ = std::make_shared<std::vector<grpc::Slice>>();
  if (!buffer.Valid()) return cursor;
  if (!buffer.Dump(cursor.slices_.get()).ok()) {
    return absl::InvalidArgumentError("malformed message: it cannot be decompressed");
  }
  for (const grpc::Slice& slice : *cursor.slices_) cursor.remaining_ += slice.size();
  return cursor;
}

absl::StatusOr<WireCursor::Tag> WireCursor::ReadTag() {
  ASSIGN_OR_RETURN(uint64_t key, ReadVarint());
  const uint64_t field = key >> 3;
  if (field == 0 || field > 536870911) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed message: field number ", field, " is not in 1 .. 536870911"));
  }
  return Tag{static_cast<int>(field), static_cast<int>(key & 7)};
}

absl::StatusOr<uint64_t> WireCursor::ReadVarint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    char byte;
    RETURN_IF_ERROR(Copy(&byte, 1));
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  return absl::InvalidArgumentError("malformed message: a varint is longer than 10 bytes");
}

absl::StatusOr<size_t> WireCursor::ReadLength() {
  ASSIGN_OR_RETURN(uint64_t length, ReadVarint());
  if (length > remaining_) return Truncated("a field");
  return static_cast<size_t>(length);
}

template <typename Use>
absl::Status WireCursor::Walk(size_t size, const Use& use) {
  if (size > remaining_) return Truncated("a value");
  remaining_ -= size;
  while (size > 0) {
    const grpc::Slice& slice = (*slices_)[slice_];
    const size_t here = std::min(size, slice.size() - offset_);
    if (here > 0) {
      use(absl::string_view(reinterpret_cast<const char*>(slice.begin()) + offset_, here));
    }
    size -= here;
    offset_ += here;
    if (offset_ == slice.size()) {
      ++slice_;
      offset_ = 0;
    }
  }
  return absl::OkStatus();
}

absl::Status WireCursor::Copy(char* to, size_t size) {
  return Walk(size, [&to](absl::string_view piece) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  });
}

absl::Status WireCursor::Skip(int wire_type) {
  const auto pass = [](absl::string_view) {};
  switch (wire_type) {
    case kWireVarint:
      return ReadVarint().status();
    case kWireFixed64:
      return Walk(8, pass);
    case kWireFixed32:
      return Walk(4, pass);
    case kWireLengthDelimited: {
      absl::StatusOr<size_t> length = ReadLength();
      return length.ok() ? Walk(*length, pass) : length.status();
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat("malformed message: wire type ", wire_type));
  }
}

}  // namespace emberd::rpc
