// The answer to a lookup, put together from its parts. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/buffers.h"
#include "base/regions.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/train_stream.h"
#include "emberd/v1/train.pb.h"

namespace emberd::client {

// What the answer to a lookup must look like.
struct ExpectedLookup {
  int64_t step = 0;
  WireType type = WireType::kFloat32;
  struct Feature {
    std::string name;
    int64_t samples = 0;
    int64_t dim = 0;
    size_t offset = 0;       // of its floats in the result's memory
    int64_t row_stride = 0;  // floats from one row to the next
    size_t span() const {    // floats from the first to the last
      return samples == 0 ? 0 : static_cast<size_t>((samples - 1) * row_stride + dim);
    }
  };
  std::vector<Feature> features = {};
  size_t floats = 0;
  bool concat = false;  // the features lie side by side
  // That the request names: of its ids; of the activations. Null: they are in the messages.
  std::shared_ptr<SharedBlock> ids = nullptr;
  std::shared_ptr<SharedBlock> activations = nullptr;

  // The request is sent; it has been answered.
  void Lend();
  void Settle();
};

// Says where each feature's activations will lie: one after the other, each from a 64-byte boundary
// on, as some frameworks need to use memory in place; or side by side. INVALID_ARGUMENT if they
// cannot lie side by side.
absl::Status PlaceActivations(bool concat, ExpectedLookup* expected);
// What the server writes to a block: the same layout, of elements of the type.
size_t SharedBytes(const ExpectedLookup& expected);
// The floats in `expected.activations`, where the server has written `bytes` bytes, and what they
// are. INTERNAL if these are not as many as they should be. The pool is needed for bfloat16.
absl::StatusOr<std::shared_ptr<float>> ReadShared(const ExpectedLookup& expected, uint64_t bytes,
                                                  BufferPool* pool,
                                                  std::vector<Activation>* activations);

// Not thread-safe. What does not fit the request is INTERNAL.
class LookupAssembler {
 public:
  // Takes memory from the pool when the first part with activations comes.
  LookupAssembler(ExpectedLookup expected, BufferPool* pool);

  // Of a Train stream. True if it was the last part.
  absl::StatusOr<bool> Add(const v1::TrainLookupResult& part);
  // Or, of any answer: its activations in their order, then what it says of shared memory.
  absl::Status AddActivation(const v1::FeatureActivation& activation);
  absl::Status Finish(uint64_t shared_bytes);
  // After the last part.
  TrainLookupResult Take();

 private:
  ExpectedLookup expected_;
  BufferPool* pool_;
  std::shared_ptr<float> memory_;
  size_t next_ = 0;  // feature whose activations come next
  TrainLookupResult result_;
};

StepTimes DecodeTimes(const v1::StepTimes& message);

}  // namespace emberd::client
