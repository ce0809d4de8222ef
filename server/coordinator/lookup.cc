// Coordinator::Lookup: decode, preprocess, gather from all shards, combine, keep the batch.
#include <utility>

#include "absl/time/clock.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/lookup_request.h"

namespace emberd::server {
namespace {

absl::StatusOr<std::shared_ptr<const preprocess::PreprocessedBatch>> Preprocess(
    const v1::LookupRequest& request, const ServedModel& model, int64_t max_bytes,
    ops::Metrics* metrics, LookupInput* input) {
  {
    ops::StageTimer timer(metrics, ops::Stage::kDecode);
    auto decoded = DecodeLookup(request, model, max_bytes);
    if (!decoded.ok()) return decoded.status();
    *input = *std::move(decoded);
  }
  ops::StageTimer timer(metrics, ops::Stage::kPreprocess);
  auto batch = model.preprocessor->Run(input->features);
  if (absl::IsResourceExhausted(batch.status())) model.metrics->AddRefused();
  return batch;
}

}  // namespace

absl::StatusOr<LookupOutput> Coordinator::LookupForReader(const v1::LookupRequest& request,
                                                          rpc::CallContext* context) {
  if (request.inference()) return Lookup(request, context);
  return absl::PermissionDeniedError(
      "inference is false, so the batch would be kept, which needs the role TRAINER; it must be "
      "true for a READER");
}

absl::StatusOr<LookupOutput> Coordinator::Lookup(const v1::LookupRequest& request,
                                                 rpc::CallContext* context) {
  auto model = registry_.Find(request.model_id(), context);
  if (!model.ok()) return model.status();
  LookupInput input;
  auto batch = Preprocess(request, **model, max_message_bytes_, metrics_, &input);
  if (!batch.ok()) return batch.status();
  (*model)->Observe(**batch);

  LookupOutput output;
  output.batch_handle = request.inference() ? 0 : NewBatchHandle();
  auto results = fanout_.Gather(*model, *batch, output.batch_handle, context);
  if (!results.ok()) return results.status();
  if (output.batch_handle != 0) {
    auto kept = std::make_shared<const KeptBatch>(*model, **batch, *results);
    const int64_t bytes = kept->bytes();
    absl::Status status =
        batches_.Insert(output.batch_handle, std::move(kept), bytes, absl::Now() + batch_ttl_);
    if (!status.ok()) {
      fanout_.Release((*model)->id, output.batch_handle);
      return status;
    }
  }
  ops::StageTimer timer(metrics_, ops::Stage::kCombine);
  output.activations = CombineActivations(*results, **model, **batch, input.activation_dtype);
  output.model = *std::move(model);
  output.order = std::move(input.order);
  output.statistics = (*batch)->statistics();
  return output;
}

}  // namespace emberd::server
