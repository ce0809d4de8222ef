// The answer to a lookup, as it is made of the shards' answers: its activations, in one block,
// which may lie in memory shared with the client, that is filled from the partial sums, and its
// bytes. Messages are made by hand so that activations are referenced, not copied; any protobuf
// client decodes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/regions.h"
#include "base/thread_pools.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "emberd/v1/train.pb.h"
#include "emberd/v1/types.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "server/host/shard_backend.h"
#include "server/step/request_reader.h"
#include "server/step/served_model.h"
#include "shard/gather/pooling.h"

namespace grpc {
class ByteBuffer;
}  // namespace grpc

namespace emberd::step {

// Where each feature's activations lie in their block.
struct ActivationLayout {
  std::vector<size_t> offsets;  // bytes, by index in the config
  std::vector<size_t> strides;  // bytes from one row to the next
  size_t bytes = 0;             // of the block
};

// Where a lookup's activations are written.
struct SharedOutput {
  std::shared_ptr<char> memory;
  ActivationLayout layout;
  NamedRegion region;  // of the client's that the memory lies in; null: it is the coordinator's own
};
// The coordinator's own, for all features of the config, in order.
std::shared_ptr<const SharedOutput> TakeOutput(const ServedModel& model,
                                               absl::Span<const int64_t> samples,
                                               v1::DataType dtype);

// Null if the request does not have `shared.activations`, or the activations have no bytes.
absl::StatusOr<std::shared_ptr<const SharedOutput>> FindSharedOutput(const RegionServer* regions,
                                                                     const v1::SharedLookup& shared,
                                                                     const LookupInput& input,
                                                                     const ServedModel& model);

// Sums that shards write straight to where the activations of a lookup are read, with no copy in
// between. Of a sample with entries on several shards, the first of them writes its part there and
// passes the others over, whose parts CombineActivations adds.

// The places in `output` of all stacks whose sums are activations as they are: float32, without
// padding columns. Nothing is passed over.
std::vector<shard::SumPlaces> PlacesOfSums(const ServedModel& model,
                                           const preprocess::PreprocessedBatch& batch,
                                           v1::DataType dtype, const SharedOutput& output);

// Has the shards after the one with this view pass over the samples that it has entries of.
// `view`: of the stack of `places`.
void PassOver(const preprocess::StackBatchView& view, shard::SumPlaces* places);

// [samples, dim] of one feature, row-major, inside the block.
struct FeatureActivationView {
  int64_t samples = 0;
  int64_t dim = 0;
  absl::Span<const char> bytes;
};

struct Activations {
  v1::DataType dtype = v1::FLOAT32;
  std::vector<FeatureActivationView> features;  // by index in the config
  std::shared_ptr<const void> owner;
  size_t shared_bytes = 0;  // that were written to the client's memory: there are no `features`
};

// The most bytes that the answer of a shard to these can have.
int64_t MaxGatherBytes(const ServedModel& model,
                       absl::Span<const preprocess::StackBatchView> stacks,
                       const shard::GatherPlaces& places = {});

// Checks a shard's answer against the batch it was asked for: every stack once, in plan order;
// samples ascending and inside the stack, sums of the padded width, as many as it was to return;
// unique rows of the size that the model stores, or rounded if activations of type `dtype` are.
// INTERNAL otherwise.
absl::Status CheckGatherResult(const host::GatherResult& result, const ServedModel& model,
                               const preprocess::PreprocessedBatch& batch, v1::DataType dtype);

// A shard may return unique rows instead of partial sums. Arranges those in the answer of shard
// `shard` so that CombineActivations makes of them, as it goes, the sums that the shard would have
// sent otherwise, bit for bit; `result->stacks` then has all stacks, in plan order. `result` has
// passed CheckGatherResult. INTERNAL if the rows are not as many as the batch has here.
absl::Status ArrangeUniqueRows(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                               int shard, BufferPool& pool, CpuPool& cpu,
                               host::GatherResult* result);

// The activations that `output` will hold.
Activations ActivationsIn(const SharedOutput& output, const ServedModel& model,
                          const preprocess::PreprocessedBatch& batch, v1::DataType dtype);

// Adds the partial sums of all shards, `results[i]` being shard i's, by the balanced binary tree
// over shards in order (each has folded its own partitions already, so this completes the tree over
// all partitions), cuts padding columns, and rounds to `dtype` once. A sample without entries is
// zero. The results have passed CheckGatherResult, and ArrangeUniqueRows. `output`: where they are
// written, and shards may have written some already. `order`: the features to combine, by their
// index in the config. `cpu`: may be null.
void CombineActivations(absl::Span<const host::GatherResult> results, const ServedModel& model,
                        const preprocess::PreprocessedBatch& batch, v1::DataType dtype,
                        const SharedOutput& output, absl::Span<const int> order,
                        CpuPool* cpu = nullptr);

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
