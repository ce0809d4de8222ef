// The tensors of requests and answers that lie in memory shared with the client: see
// shared_memory.proto. Nothing there is trusted: places are checked against the region, and ids are
// copied before anybody looks at them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/regions.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/types.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "server/rpc/call_context.h"
#include "server/step/request_reader.h"
#include "server/step/served_model.h"
#include "shard/types.h"

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

// The memory that `block`, called `path` in errors, names. FAILED_PRECONDITION if `regions` is
// null: there is none on this coordinator.
absl::StatusOr<std::shared_ptr<char>> FindBlock(const RegionServer* regions,
                                                const v1::SharedBlock& block,
                                                absl::string_view path);

// What copies of the ids take, as they would in a message; null if there are none.
// May wait for the caller, as CallContext::MakeRoom does.
absl::StatusOr<rpc::CallContext::Room> MakeRoomForSharedIds(const RegionServer* regions,
                                                            const v1::LookupRequest& request,
                                                            const rpc::CallContext* context);
// Copies the ids to where they lie in other requests.
absl::Status CopySharedIds(const RegionServer* regions, v1::LookupRequest* request);

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

}  // namespace emberd::step
