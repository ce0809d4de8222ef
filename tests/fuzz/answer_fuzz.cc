// One part of the answer to a lookup on a training stream, cut into slices as the first byte says,
// and given to the client's assembler for a request that the second byte chooses. Catches: bytes
// that crash the reader, elements that are written beyond the activations, or in another place.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "base/floats.h"
#include "client/cpp/batch_codec.h"
#include "tests/fuzz/canonical.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace answer_fuzz {

using client::ExpectedLookup;
using client::WireType;
using fuzz::Require;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

ExpectedLookup Expected(uint8_t choice) {
  ExpectedLookup expected;
  expected.step = 7;
  expected.type = (choice & 1) != 0 ? WireType::kBfloat16 : WireType::kFloat32;
  expected.features.push_back({.name = "a", .samples = 3, .dim = 2});
  expected.features.push_back({.name = "b", .samples = 3, .dim = 1});
  Require(client::PlaceActivations((choice & 4) != 0, &expected).ok(), "the features fit");
  return expected;
}

float ElementOf(const v1::Tensor& tensor, int64_t i) {
  if (tensor.dtype() == v1::FLOAT32) {
    float value;
    std::memcpy(&value, tensor.data().data() + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t value;
  std::memcpy(&value, tensor.data().data() + i * sizeof(value), sizeof(value));
  return FromBfloat16(value);
}

void RequireSame(const client::TrainLookupResult& found, const v1::TrainLookupResult& sent) {
  Require(static_cast<int>(found.activations.size()) == sent.activations_size(),
          "each feature has its activations");
  for (int f = 0; f < sent.activations_size(); ++f) {
    const client::Activation& activation = found.activations[f];
    for (int64_t s = 0; s < activation.samples; ++s) {
      for (int64_t c = 0; c < activation.dim; ++c) {
        const float here = activation.values[s * activation.row_stride + c];
        const float there = ElementOf(sent.activations(f).activation(), s * activation.dim + c);
        Require(std::memcmp(&here, &there, sizeof(here)) == 0 || (here != here && there != there),
                "activations are those that were sent");
      }
    }
  }
}

EMBERD_FUZZ_TARGET(answer, data, size) {
  if (size < 2) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t longest = std::max<size_t>(1, data[0]);
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += longest) {
    slices.emplace_back(bytes.substr(begin, longest));
  }
  grpc::ByteBuffer buffer(slices.data(), slices.size());
  grpc::ProtoBufferReader reader(&buffer);
  v1::TrainLookupResult sent;
  if (!sent.ParseFromZeroCopyStream(&reader)) return 0;
  BufferPool pool;
  client::LookupAssembler assembler(Expected(data[1]), &pool);
  const absl::StatusOr<bool> complete = assembler.Add(sent);
  if (!complete.ok()) {
    Require(complete.status().code() == absl::StatusCode::kInternal, "the code is right");
    return 0;
  }
  if (*complete) RequireSame(assembler.Take(), sent);
  fuzz::accepted = true;
  return 0;
}

}  // namespace answer_fuzz
}  // namespace emberd
