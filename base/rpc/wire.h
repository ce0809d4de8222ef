// Statuses and messages as gRPC carries them, and how processes connect. Messages whose payload
// must not be copied are written by an encoder that lets large fields stay where they are.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <google/protobuf/message.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace grpc {
class ByteBuffer;
class ChannelArguments;
class Slice;
class Status;
}  // namespace grpc

namespace emberd::rpc {

// absl::Status inside the process, grpc::Status on the wire: the codes are the same numbers.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// INVALID_ARGUMENT if the bytes are no message of this type.
absl::Status DecodeMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
// RESOURCE_EXHAUSTED: protobuf writes no message of 2 GiB and more.
absl::StatusOr<grpc::ByteBuffer> EncodeMessage(const google::protobuf::Message& message);

// For a channel to a process of emberd in the same network: it takes messages of any size, uses no
// proxy, and shares its connection with no other channel. A peer that fell silent, because the
// network was cut or its machine is gone, is given up some 25 s after its last sign of life. The
// kernel alone would try for a quarter of an hour; a starved machine may need seconds to answer.
grpc::ChannelArguments ConnectionArguments();

// Bytes that stay where they are until the last reference to `owner` goes.
struct SharedBytes {
  absl::string_view bytes;
  std::shared_ptr<const void> owner;
};

// A field whose content is not complete: its number in the message around it, and what its content
// begins with, serialized.
struct OpenField {
  int number;
  std::string begin;
};
// Tags, lengths and begins of fields that lie in each other: the content of each ends with the next
// of `fields`, that of the last with `bytes` bytes, which the caller adds.
std::string BeginFields(std::initializer_list<OpenField> fields, size_t bytes);

// Builds one message as a list of slices. Small pieces are gathered into a scratch string, large
// ones are referenced.
class WireEncoder {
 public:
  WireEncoder();
  ~WireEncoder();

  void Varint(uint64_t value);
  void VarintField(int field, uint64_t value);
  void Fixed64Field(int field, uint64_t value);
  void BytesField(int field, absl::string_view value);
  // Tag and length of a length-delimited field (bytes or a nested message); the caller adds
  // `length` bytes.
  void BeginField(int field, size_t length);
  void Raw(absl::string_view bytes);
  // References the bytes; the owner lives until gRPC has sent them.
  void Raw(SharedBytes bytes);

  // The message. The encoder is empty afterwards.
  grpc::ByteBuffer Finish();
  // The same in one piece, if nothing was referenced.
  std::string FinishText();

 private:
  void Flush();

  std::string scratch_;
  std::vector<grpc::Slice> slices_;
};

}  // namespace emberd::rpc
