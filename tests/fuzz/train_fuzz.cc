// Messages of a training stream, cut into slices as the first byte says, and given to the
// assembler. Catches: bytes that crash the reader, and a whole request that is kept.
#include <algorithm>
#include <string>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/byte_buffer.h>

#include "base/rpc/wire.h"
#include "server/step/request_reader.h"
#include "tests/fuzz/canonical.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace train_fuzz {

using fuzz::Require;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

grpc::ByteBuffer Cut(const std::string& bytes, size_t longest) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += longest) {
    slices.emplace_back(bytes.substr(begin, longest));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

EMBERD_FUZZ_TARGET(train, data, size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  v1::TrainRequest message;
  const absl::Status read = rpc::DecodeMessage(Cut(bytes, std::max<size_t>(1, data[0])), &message);
  if (!read.ok()) {
    Require(read.code() == absl::StatusCode::kInvalidArgument, "the code is right");
    return 0;
  }
  fuzz::accepted = fuzz::Canonical<v1::TrainRequest>(bytes) == bytes;
  step::TrainAssembler assembler;
  const bool continues = message.lookup().continues() || message.update().continues();
  const auto taken = assembler.Add(&message, static_cast<int64_t>(size));
  Require(!taken.ok() || continues || taken->has_value(), "a whole request is handed on");
  return 0;
}

}  // namespace train_fuzz
}  // namespace emberd
