// Between the structs of batch.h and the requests and answers of the service: how requests are made
// of ids and gradients, where the activations of an answer go, and how it is put together from its
// parts. Everything that a server sends is checked before it is believed: what does not fit its
// request is INTERNAL. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/regions.h"
#include "client/cpp/batch.h"
#include "client/cpp/model.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/train.pb.h"
#include "emberd/v1/types.pb.h"

namespace grpc {
class ByteBuffer;
}  // namespace grpc

namespace emberd::client {

struct TrainOptions;

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
  // Where the request says that they lie. Null: they are in the messages.
  std::shared_ptr<SharedBlock> ids = nullptr;
  std::shared_ptr<SharedBlock> activations = nullptr;

  void Lend();    // when the request is sent
  void Settle();  // when it has been answered
};

// Says where each feature's activations will lie: one after the other, each from a 64-byte boundary
// on, as some frameworks need to use memory in place; or side by side. INVALID_ARGUMENT if they
// cannot lie side by side.
absl::Status PlaceActivations(bool concat, ExpectedLookup* expected);
// What the server writes to a block: the same layout, of elements of the type.
size_t SharedBytes(const ExpectedLookup& expected);

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

// ---- Between spans and the Tensor message

int64_t Size(const IntSpan& ints);

// `size` floats of any value at a multiple of 64 bytes; they go back to the pool, which may be gone
// by then, with the last reference.
std::shared_ptr<float> TakeFloats(BufferPool* pool, size_t size);

void SetHead(v1::DataType dtype, absl::Span<const int64_t> shape, v1::Tensor* tensor);
// The shape must fit the number of elements. Where there is a `writer`, the elements of ints and of
// float32 go there, and the tensor has no data.
void EncodeInts(const IntSpan& ints, absl::Span<const int64_t> shape, v1::Tensor* tensor,
                BlockWriter* writer = nullptr);
void EncodeFloats(absl::Span<const float> floats, absl::Span<const int64_t> shape, WireType type,
                  v1::Tensor* tensor, BlockWriter* writer = nullptr);

v1::DataType WireDataType(WireType type);
int64_t ElementBytes(WireType type);

// The elements of a tensor of float32, where they lie in it. INTERNAL if it is not [rows, dim]; the
// message says what it is instead.
absl::StatusOr<absl::Span<const float>> DecodeFloats(const v1::Tensor& tensor, int64_t rows,
                                                     int64_t dim);

// RESOURCE_EXHAUSTED if the message is longer than the 2^31 - 1 bytes that protobuf can carry.
absl::Status CheckSize(const google::protobuf::Message& message);

// ---- Whole requests and answers

// INVALID_ARGUMENT for spans that make no tensor and for features that the model does not have; the
// rest is the server's to judge.
absl::StatusOr<v1::LookupRequest> EncodeLookup(const Model& model,
                                               absl::Span<const FeatureIds> features,
                                               bool inference, WireType activations);
// What the answer looks like. INVALID_ARGUMENT as above, and if the features cannot lie side by
// side although they are to (`concat`).
absl::StatusOr<ExpectedLookup> ExpectLookup(const Model& model,
                                            absl::Span<const FeatureIds> features, WireType type,
                                            bool concat = false);
// The activations lie in memory of the pool, or in `expected.activations`.
absl::StatusOr<LookupResult> DecodeLookup(ExpectedLookup expected, bool inference,
                                          const v1::LookupResponse& response, BufferPool* pool);

// All but the mutation. Gradients go to `shared`, or, where that is null or has no memory, into the
// message.
absl::StatusOr<v1::ApplyGradientsRequest> EncodeApply(const Model& model, const BatchHandle& batch,
                                                      absl::Span<const FeatureGradient> gradients,
                                                      const ApplyOptions& options, WireType type,
                                                      SharedGradients* shared = nullptr);

// ---- The requests of a Train stream, without copies of their payload: gradients are sent from
// where they lie

// A request is cut into messages that hold about this many bytes of tensors, so that sending,
// receiving and computing overlap. A tensor stays whole.
inline constexpr size_t kTrainMessageBytes = size_t{1} << 20;

grpc::ByteBuffer EncodeTrainStart(const Model& model, const TrainOptions& options);

// A TrainLookup in parts. INVALID_ARGUMENT for spans that make no tensor and for features that the
// model does not have; the rest is the server's to judge. `concat`: see TrainLookupOptions.
// `memory`: shared with the coordinator, used where it is worth it; null: there is none.
absl::StatusOr<std::deque<grpc::ByteBuffer>> EncodeTrainLookup(
    const Model& model, int64_t step, absl::Span<const FeatureIds> features, WireType activations,
    bool concat, ExpectedLookup* expected, SharedMemory* memory = nullptr);

// A TrainUpdate in parts, made one after the other, so that each can be sent while the next is
// converted.
class UpdateEncoder {
 public:
  // Finds all that can be wrong. What has to be converted or copied goes to `shared`, here, or,
  // where that is null or has no memory, to memory of the pool, part by part. All that it is given
  // must outlive it.
  static absl::StatusOr<UpdateEncoder> Make(const Model& model, int64_t step,
                                            absl::Span<const FeatureGradient> gradients,
                                            const UpdateOptions& options, WireType type,
                                            BufferPool* pool, SharedGradients* shared = nullptr);

  // The next part; nothing after the last one. There is at least one.
  std::optional<grpc::ByteBuffer> Next();

 private:
  struct Gradient {
    const FeatureGradient* values = nullptr;
    int64_t dim = 0;
    size_t bytes = 0;       // that are sent after `head`
    std::string head = {};  // serialized, but for those bytes
  };
  UpdateEncoder(int64_t step, const UpdateOptions& options, WireType type, BufferPool* pool)
      : step_(step), options_(options), type_(type), pool_(pool) {}
  v1::TrainUpdate Rest(bool last) const;

  const int64_t step_;
  const UpdateOptions& options_;
  const WireType type_;
  BufferPool* const pool_;
  std::vector<Gradient> gradients_;
  size_t next_ = 0;
  bool ended_ = false;
};

}  // namespace emberd::client
