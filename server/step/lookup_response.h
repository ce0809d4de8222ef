// The answer to a lookup, and its bytes. Messages are made by hand so that activations are
// referenced, not copied; any protobuf client decodes them.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "emberd/v1/statistics.pb.h"
#include "emberd/v1/train.pb.h"
#include "server/step/activations.h"
#include "server/step/served_model.h"

namespace grpc {
class ByteBuffer;
}  // namespace grpc

namespace emberd::step {

struct LookupOutput {
  ServedModelPtr model;
  uint64_t batch_handle = 0;  // 0: the batch was not kept
  std::vector<int> order;     // features of the config, as the request lists them
  Activations activations;
  v1::BatchStatistics statistics;
};

// A LookupResponse.
grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output);
// The same bytes, copied: of a small one, that costs less.
std::string EncodeLookupText(const LookupOutput& output);

// TrainResponses with the result of a step's lookup, without its batch handle, in messages of about
// 1 MiB: each but the last ends with the activation that brings it to that size.
std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const LookupOutput& output,
                                               const v1::StepTimes& times);

}  // namespace emberd::step
