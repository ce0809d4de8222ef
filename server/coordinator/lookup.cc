// Coordinator::Lookup: decode, preprocess, gather from all shards, combine, keep the batch.
#include <utility>

#include "absl/random/random.h"
#include "absl/time/clock.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/lookup_request.h"
#include "server/rpc/status_codes.h"

namespace emberd::server {
namespace {

// Keeps the shards' views of a batch alive: the batch goes before the model whose preprocessor made
// it.
struct BatchOwner {
  std::shared_ptr<const ServedModel> model;
  std::shared_ptr<const preprocess::PreprocessedBatch> batch;
};

// Random, so that handles of different coordinators and lives do not meet; never 0.
uint64_t NewHandle() {
  thread_local absl::BitGen generator;
  return absl::Uniform<uint64_t>(generator, 1, ~uint64_t{0});
}

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
  return model.preprocessor->Run(input->features);
}

}  // namespace

absl::StatusOr<LookupOutput> Coordinator::Lookup(const v1::LookupRequest& request,
                                                 rpc::CallContext* context) {
  auto model = registry_.Find(request.model_id(), context);
  if (!model.ok()) return model.status();
  LookupInput input;
  auto batch = Preprocess(request, **model, max_message_bytes_, metrics_, &input);
  if (!batch.ok()) return batch.status();
  (*model)->metrics->ObserveBatch((*batch)->statistics());
  (*model)->observed->Observe((*batch)->statistics());

  LookupOutput output;
  output.batch_handle = request.inference() ? 0 : NewHandle();
  auto owner = std::make_shared<BatchOwner>(BatchOwner{*model, *batch});
  auto results = GatherFromShards(**model, *batch, output.batch_handle, owner, context);
  if (!results.ok()) return results.status();
  if (output.batch_handle != 0) {
    absl::Status status = KeepBatch(output.batch_handle, *model, **batch, *results);
    if (!status.ok()) {
      ReleaseOnShards((*model)->id, output.batch_handle);
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

absl::StatusOr<std::vector<GatherResult>> Coordinator::GatherFromShards(
    const ServedModel& model, const std::shared_ptr<const preprocess::PreprocessedBatch>& batch,
    uint64_t batch_handle, const std::shared_ptr<const void>& owner, rpc::CallContext* context) {
  ops::StageTimer timer(metrics_, ops::Stage::kGatherWait);
  const auto start = [&](size_t shard) {
    GatherCommand command;
    command.model_id = model.id;
    command.batch_handle = batch_handle;
    command.batch_ttl = batch_ttl_;
    command.stacks = batch->ShardView(static_cast<int>(shard));
    command.owner = owner;
    return shards_[shard]->Gather(std::move(command), context);
  };
  std::vector<std::unique_ptr<GatherCall>> calls;
  for (size_t i = 0; i < shards_.size(); ++i) calls.push_back(start(i));

  std::vector<GatherResult> results(shards_.size());
  absl::Status error;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const absl::Time began = absl::Now();
    auto result = calls[i]->Wait();
    if (absl::IsNotFound(result.status())) {
      absl::Status restored = registry_.Restore(model, static_cast<int>(i), context);
      if (restored.ok()) {
        calls[i] = start(i);
        result = calls[i]->Wait();
      } else {
        result = restored;
      }
    }
    absl::Status status = result.status();
    if (status.ok())
      status = rpc::Annotate(CheckGatherResult(*result, model, *batch), shards_[i]->name());
    ObserveLink(static_cast<int>(i), ops::Rpc::kShardGather, status, began);
    if (status.ok()) {
      results[i] = *std::move(result);
    } else if (error.ok()) {
      error = status;
    }
  }
  if (error.ok()) return results;
  calls.clear();  // cancels what is still under way
  if (batch_handle != 0) ReleaseOnShards(model.id, batch_handle);
  return error;
}

void Coordinator::ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status,
                              absl::Time began) {
  metrics_->ShardLink(shard)->Observe(rpc, status.code(),
                                      absl::ToDoubleSeconds(absl::Now() - began));
}

absl::Status Coordinator::KeepBatch(uint64_t handle,
                                    const std::shared_ptr<const ServedModel>& model,
                                    const preprocess::PreprocessedBatch& batch,
                                    const std::vector<GatherResult>& results) {
  auto kept = std::make_shared<KeptBatch>();
  kept->model = model;
  kept->feature_samples.assign(batch.feature_samples().begin(), batch.feature_samples().end());
  kept->feature_sample_begin.assign(batch.feature_sample_begin().begin(),
                                    batch.feature_sample_begin().end());
  for (const GatherResult& result : results) {
    KeptShard& shard = kept->shards.emplace_back();
    shard.incarnation = result.incarnation;
    for (const StackSumsView& stack : result.stacks) {
      shard.samples.emplace_back(stack.samples.begin(), stack.samples.end());
    }
  }
  const int64_t bytes = kept->bytes();
  return batches_.Insert(handle, std::move(kept), bytes, absl::Now() + batch_ttl_);
}

}  // namespace emberd::server
