// Coordinator::ApplyGradients: decode, stage on every shard, then commit on every shard.
//
// All or nothing: shards change nothing until every one of them has checked and holds all it needs.
// A shard that dies between the two words leaves the update half done; the batch and the mutation
// are then kept, so that a retry finishes it: shards that committed answer from their record, the
// others apply.
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/gradients.h"

namespace emberd::server {

absl::StatusOr<v1::ApplyGradientsResponse> Coordinator::ApplyGradients(
    const v1::ApplyGradientsRequest& request, rpc::CallContext* context) {
  const uint64_t handle = request.batch_handle();
  const Mutation mutation{request.mutation().client_id(), request.mutation().sequence(), handle};
  if (absl::Status status = CheckMutation(mutation); !status.ok()) return status;
  auto before = record_.Begin(mutation);
  if (!before.ok()) return before.status();
  v1::ApplyGradientsResponse response;
  if (before->has_value()) {
    server_metrics_->AddReplay();
    SetRowCounts(**before, &response);
    response.set_replayed(true);
    return response;
  }

  const absl::StatusOr<RowCounts> rows = ClaimAndApply(request, mutation, context);
  if (!rows.ok()) {
    record_.Abort(mutation);
    if (absl::IsFailedPrecondition(rows.status())) {
      // A shard restarted and lost the batch: no retry can succeed.
      batches_.Erase(handle);
      fanout_.Release(request.model_id(), handle);
    }
    return rows.status();
  }
  record_.Finish(mutation, *rows);
  batches_.Erase(handle);
  SetRowCounts(*rows, &response);
  return response;
}

absl::StatusOr<RowCounts> Coordinator::ClaimAndApply(const v1::ApplyGradientsRequest& request,
                                                     const Mutation& mutation,
                                                     rpc::CallContext* context) {
  auto batch = batches_.Claim(request.batch_handle());
  if (!batch.ok()) return batch.status();
  absl::Cleanup unclaim = [&] { batches_.Unclaim(request.batch_handle()); };
  if ((*batch)->model->id != request.model_id()) {
    return absl::InvalidArgumentError(absl::StrCat("batch_handle ", request.batch_handle(),
                                                   " belongs to model_id ", (*batch)->model->id,
                                                   ", not ", request.model_id()));
  }
  return ApplyOnShards(request, **batch, mutation, context);
}

absl::StatusOr<RowCounts> Coordinator::ApplyOnShards(const v1::ApplyGradientsRequest& request,
                                                     const KeptBatch& batch,
                                                     const Mutation& mutation,
                                                     rpc::CallContext* context) {
  absl::StatusOr<GradientInput> input = [&] {
    ops::StageTimer timer(metrics_, ops::Stage::kDecode);
    return DecodeGradients(request, batch);
  }();
  if (!input.ok()) return input.status();
  auto staged = fanout_.Stage(
      *input, batch, {.handle = request.batch_handle(), .mutation = mutation, .group_part = {}},
      context);
  if (!staged.ok()) return staged.status();
  return (*staged)->Commit();
}

}  // namespace emberd::server
