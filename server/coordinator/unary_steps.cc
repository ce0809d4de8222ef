#include "server/coordinator/unary_steps.h"

#include "base/status.h"
#include "server/coordinator/model_registry.h"
#include "server/ops/metrics.h"
#include "server/security/callers.h"

namespace emberd::coordinator {

absl::StatusOr<step::LookupOutput> UnarySteps::Lookup(const v1::LookupRequest& request,
                                                      v1::Token::Role role,
                                                      rpc::CallContext* context) {
  if (!request.inference() && !security::Suffices(role, v1::Token::TRAINER)) {
    return absl::PermissionDeniedError(
        "inference is false, so the batch would be kept, which needs the role TRAINER; it must be "
        "true for a READER");
  }
  return resources_->registry->OnModel(
      request.model_id(), context, [&](const step::ServedModelPtr& model) {
        step::StepHooks no_hooks;
        v1::StepTimes times;
        return resources_->path->Lookup(model, request, context, &no_hooks, &times);
      });
}

absl::StatusOr<v1::ApplyGradientsResponse> UnarySteps::ApplyGradients(
    const v1::ApplyGradientsRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(resources_->registry->CheckNotLost(request.model_id(), context));
  const uint64_t handle = request.batch_handle();
  const host::Mutation mutation{request.mutation().client_id(), request.mutation().sequence(),
                                host::UpdateTag(request.model_id())};
  RETURN_IF_ERROR(host::CheckMutation(mutation));
  const step::UpdateName name{
      .model_id = request.model_id(), .handle = handle, .mutation = mutation};
  step::StepHooks no_hooks;
  v1::StepTimes times;
  const auto made = resources_->path->Update(name, request, context, &no_hooks, &times);
  if (!made.ok()) {
    if (absl::IsNotFound(made.status())) {  // no batch is kept of a model that is only looked up
      const auto model = resources_->registry->Find(request.model_id(), context);
      if (model.ok()) RETURN_IF_ERROR(step::CheckTrainable(**model));
    }
    if (!absl::IsDataLoss(made.status())) return made.status();
    // The rows that the batch was looked up from are gone: no retry can succeed.
    resources_->path->Discard(request.model_id(), handle);
    return resources_->registry->Explain(request.model_id(), /*history=*/0, made.status());
  }
  if (made->replayed) resources_->server_metrics->Add(ops::MetricId::kReplays);
  v1::ApplyGradientsResponse response;
  host::SetRowCounts(made->rows, &response);
  response.set_replayed(made->replayed);
  return response;
}

absl::StatusOr<v1::ReleaseBatchResponse> UnarySteps::ReleaseBatch(
    const v1::ReleaseBatchRequest& request, rpc::CallContext*) {
  RETURN_IF_ERROR(resources_->path->Release(request.model_id(), request.batch_handle()));
  return v1::ReleaseBatchResponse();
}

}  // namespace emberd::coordinator
