// The requests of a Train stream, encoded without copies of their payload: gradients are sent from
// where they lie. Internal to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "client/cpp/batch.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/model.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/train_stream.h"
#include "emberd/v1/train.pb.h"

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
