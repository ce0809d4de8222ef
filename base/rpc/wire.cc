#include "base/rpc/wire.h"

#include <cassert>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace emberd::rpc {
namespace {

// Wire types of protobuf that are written here.
constexpr int kWireVarint = 0;
constexpr int kWireFixed64 = 1;
constexpr int kWireLengthDelimited = 2;

// Below this size a copy is cheaper than a slice of its own.
constexpr size_t kCopyBelow = 512;

// A client of gRPC gets another error in place of one whose headers have more than 8 KiB. Bytes
// that are not printable ASCII take three there.
constexpr size_t kMostOfMessage = 6144;

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::string_view message = status.message();
  size_t end = 0;
  for (size_t sent = 0; end < message.size() && sent <= kMostOfMessage; ++end) {
    sent += absl::ascii_isprint(message[end]) && message[end] != '%' ? 1 : 3;
  }
  while (end > 0 && end < message.size() && (message[end] & 0xC0) == 0x80) --end;  // UTF-8
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(message.substr(0, end)));
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

absl::StatusOr<grpc::ByteBuffer> EncodeMessage(const google::protobuf::Message& message) {
  if (const size_t size = message.ByteSizeLong(); size > std::numeric_limits<int32_t>::max()) {
    return absl::ResourceExhaustedError(absl::StrCat("the ", message.GetTypeName(), " has ", size,
                                                     " bytes; a message has less than 2 GiB"));
  }
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  const absl::Status status =
      FromGrpcStatus(grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(
          message, &bytes, &own_buffer));
  if (!status.ok()) return status;
  return bytes;
}

grpc::ChannelArguments ConnectionArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // unlimited; servers have limits of their own
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 15'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // any number
  // The flow control of a connection couples those who share it.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

std::string BeginFields(std::initializer_list<OpenField> fields, size_t bytes) {
  std::string begin;
  for (auto field = std::rbegin(fields); field != std::rend(fields); ++field) {
    WireEncoder encoder;
    encoder.BeginField(field->number, field->begin.size() + begin.size() + bytes);
    encoder.Raw(field->begin);
    encoder.Raw(begin);
    begin = encoder.FinishText();
  }
  return begin;
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

}  // namespace emberd::rpc
