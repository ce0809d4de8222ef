// Messages of a training stream, cut into slices as the first byte says, and given to the
// assembler. Catches: bytes that crash the reader that leaves gradients where they are, and a
// message that it reads in another way than protobuf.
#include <algorithm>
#include <string>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/byte_buffer.h>

#include "server/coordinator/train/train_message.h"
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

// With the bytes of gradients back in their tensors.
std::string Whole(const coordinator::TrainMessage& message) {
  v1::TrainRequest whole = message.request;
  for (size_t i = 0; i < message.data.size(); ++i) {
    if (message.data[i].pieces.empty()) continue;
    std::string* const data = whole.mutable_update()
                                  ->mutable_gradients(static_cast<int>(i))
                                  ->mutable_gradient()
                                  ->mutable_data();
    Require(data->empty(), "the bytes of a gradient are in one place");
    for (const absl::string_view piece : message.data[i].pieces) {
      data->append(piece.data(), piece.size());
    }
  }
  return fuzz::Canonical<v1::TrainRequest>(whole.SerializeAsString());
}

EMBERD_FUZZ_TARGET(train, data, size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto message = coordinator::DecodeTrainMessage(Cut(bytes, std::max<size_t>(1, data[0])));
  if (!message.ok()) {
    Require(message.status().code() == absl::StatusCode::kInvalidArgument, "the code is right");
    return 0;
  }
  v1::TrainRequest request;
  Require(request.ParseFromString(bytes), "what is read is valid");
  Require(Whole(*message) == fuzz::Canonical<v1::TrainRequest>(bytes), "protobuf reads the same");
  fuzz::accepted = Whole(*message) == bytes;
  coordinator::TrainAssembler assembler;
  const bool update = message->request.has_update();
  const auto taken = assembler.Add(&*message, static_cast<int64_t>(size));
  Require(!taken.ok() || !update || taken->has_value(), "a part of an update is handed on");
  return 0;
}

}  // namespace train_fuzz
}  // namespace emberd
