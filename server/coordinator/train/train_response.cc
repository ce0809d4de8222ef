#include "server/coordinator/train/train_response.h"

#include <string>
#include <vector>

#include "emberd/v1/train.pb.h"
#include "server/coordinator/activation_wire.h"
#include "server/rpc/message_stream.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

using Result = v1::TrainLookupResult;

// A TrainResponse with a lookup: `head` are the result's small fields, serialized.
grpc::ByteBuffer EncodePart(const std::string& head, const std::vector<ActivationWire>& wires) {
  size_t size = head.size();
  for (const ActivationWire& wire : wires) size += wire.size();
  rpc::WireEncoder encoder;
  encoder.BeginField(v1::TrainResponse::kLookupFieldNumber, size);
  encoder.Raw(head);
  for (const ActivationWire& wire : wires) wire.AppendTo(&encoder);
  return encoder.Finish();
}

}  // namespace

std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const TrainLookupOutput& output) {
  Result head;
  head.set_step(step);
  head.set_continues(true);
  const std::string more = head.SerializeAsString();
  std::deque<grpc::ByteBuffer> parts;
  std::vector<ActivationWire> wires;
  size_t size = 0;
  for (const int feature : output.lookup.order) {
    if (size >= rpc::kPartBytes) {
      parts.push_back(EncodePart(more, wires));
      wires.clear();
      size = 0;
    }
    wires.emplace_back(output.lookup, feature, Result::kActivationsFieldNumber);
    size += wires.back().size();
  }
  head.set_continues(false);
  *head.mutable_statistics() = output.lookup.statistics;
  *head.mutable_times() = output.times;
  parts.push_back(EncodePart(head.SerializeAsString(), wires));
  return parts;
}

}  // namespace emberd::server
