// The requests of a Train stream, encoded without copies of their payload: gradients are sent from
// where they lie. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "client/cpp/batch.h"
#include "client/cpp/lookup_assembler.h"
#include "client/cpp/model.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_gradients.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/train_stream.h"

namespace emberd::client {

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

// A TrainUpdate in parts. What has to be converted or copied goes to `shared`, or, where that is
// null or has no memory, to memory of the pool.
absl::StatusOr<std::deque<grpc::ByteBuffer>> EncodeTrainUpdate(
    const Model& model, int64_t step, absl::Span<const FeatureGradient> gradients,
    const UpdateOptions& options, WireType type, BufferPool* pool,
    SharedGradients* shared = nullptr);

}  // namespace emberd::client
