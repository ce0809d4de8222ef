#include "server/coordinator/programs/program_runner.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/elementwise.h"
#include "server/coordinator/programs/program_spec.h"
#include "server/coordinator/unary_steps.h"

namespace emberd::coordinator {
namespace {

// Batches of lookups live as long as somebody has them.
class OwnedBatch final : public step::StepHooks {
 public:
  bool owns_batch() const override { return true; }
};

// The batch for the model as it is now: its rows may have been reset since, its plan is the same.
step::PreparedLookup ForModel(const step::PreparedLookup& prepared,
                              const step::ServedModelPtr& now) {
  if (prepared.model == now) return prepared;
  step::PreparedLookup result = prepared;
  // The preprocessor that made the batch has its memory.
  const auto owner = std::make_shared<step::PreparedLookup>(prepared);
  result.batch = {owner, prepared.batch.get()};
  result.model = now;
  return result;
}

}  // namespace

ProgramRunner::ProgramRunner(const CoordinatorResources* resources)
    : resources_(resources),
      client_id_(absl::StrCat("programs ", absl::Hex(rpc::RandomId(), absl::kZeroPad16))) {}

absl::StatusOr<step::ServedModelPtr> ProgramRunner::Find(const Program& program,
                                                         rpc::CallContext* context) {
  auto model = resources_->registry->Find(program.model_id(), context);
  // It may have been dropped and declared with another plan.
  if (absl::IsNotFound(model.status())) {
    model = resources_->registry->FindByName(program.spec().model(), context);
  }
  if (!model.ok()) return model.status();
  return program.ModelFor(*model);
}

absl::StatusOr<ValuePtr> ProgramRunner::Prepare(const Program& program, v1::Literal batch,
                                                rpc::CallContext* context) {
  if (program.kind() != v1::ProgramSpec::LOOKUP) {
    ASSIGN_OR_RETURN(const ValuePtr tuple, ReadTuple(store(), std::move(batch)));
    if (program.kind() == v1::ProgramSpec::UPDATE) {
      RETURN_IF_ERROR(CheckGradients(program.spec(), tuple->tensors));
    }
    return tuple;
  }
  ASSIGN_OR_RETURN(const auto model, Find(program, context));
  ASSIGN_OR_RETURN(const v1::LookupRequest request,
                   BatchRequest(program.spec(), *model, std::move(batch)));
  step::StepHooks no_hooks;
  v1::StepTimes times;
  ASSIGN_OR_RETURN(
      step::PreparedLookup prepared,
      resources_->path->Prepare(model, request, /*context=*/nullptr, &no_hooks, &times));
  auto value = std::make_shared<Value>();
  ASSIGN_OR_RETURN(auto share, store()->Reserve(prepared.batch->bytes()));
  value->shares.push_back(std::move(share));
  value->statistics = prepared.batch->statistics();
  value->prepared = std::move(prepared);
  value->program_key = program.key();
  return value;
}

absl::StatusOr<ValuePtr> ProgramRunner::Lookup(const Program& program, const Value& batch,
                                               rpc::CallContext* context) {
  const auto look_up = [&](const step::ServedModelPtr& model) {
    OwnedBatch owned;
    v1::StepTimes times;
    return resources_->path->LookUp(ForModel(*batch.prepared, model), program.spec().inference(),
                                    context, &owned, &times);
  };
  ASSIGN_OR_RETURN(auto model, Find(program, context));
  auto found = look_up(model);
  if (!found.ok()) {
    const absl::Status status =
        resources_->registry->Explain(model->id, model->history, found.status());
    // Reset since this coordinator heard of it: with the rows of now.
    if (!absl::IsAborted(status) || absl::IsAborted(found.status())) return status;
    ASSIGN_OR_RETURN(model, Find(program, context));
    found = look_up(model);
    if (!found.ok())
      return resources_->registry->Explain(model->id, model->history, found.status());
  }
  std::shared_ptr<LookedUpBatch> looked_up;
  if (found->batch_handle != 0) {
    looked_up = std::make_shared<LookedUpBatch>(resources_->path, model->id, found->batch_handle);
  }
  Tensors tensors;
  for (int i = 0; i < program.spec().inputs_size(); ++i) {  // they come first in the request
    const int feature = found->order[i];
    const step::FeatureActivationView& view = found->activations.features[feature];
    auto tensor = std::make_shared<v1::NamedTensor>();
    tensor->set_name(model->config.features(feature).name());
    tensor->mutable_tensor()->set_dtype(found->activations.dtype);
    for (const int64_t extent : model->ActivationShape(feature, view.samples)) {
      tensor->mutable_tensor()->add_shape(extent);
    }
    tensor->mutable_tensor()->set_data(view.bytes.data(), view.bytes.size());
    tensors.push_back(std::move(tensor));
  }
  ASSIGN_OR_RETURN(const auto value, MakeTuple(store(), std::move(tensors)));
  ASSIGN_OR_RETURN(auto share, store()->Reserve(kValueBytes));
  value->shares.insert(value->shares.begin(), std::move(share));
  value->looked_up = std::move(looked_up);
  value->statistics = std::move(found->statistics);
  return value;
}

absl::StatusOr<v1::MadeUpdate> ProgramRunner::Update(const Program& program, const Value& looked_up,
                                                     const Value& gradients,
                                                     const UpdateTerms& terms,
                                                     rpc::CallContext* context) {
  RETURN_IF_ERROR(Find(program, context).status());
  RETURN_IF_ERROR(CheckGradients(program.spec(), gradients.tensors));
  v1::ApplyGradientsRequest request;
  request.set_model_id(program.model_id());
  request.set_batch_handle(looked_up.looked_up->handle());
  *request.mutable_mutation() = terms.mutation;
  if (terms.mutation.client_id().empty()) {
    request.mutable_mutation()->set_client_id(client_id_);
    request.mutable_mutation()->set_sequence(++sequence_);
  }
  for (const auto& gradient : gradients.tensors) {
    v1::FeatureGradient* to = request.add_gradients();
    to->set_feature(gradient->name());
    *to->mutable_gradient() = gradient->tensor();
  }
  *request.mutable_hyperparameters() = terms.arguments.hyperparameters();
  if (terms.arguments.has_step()) request.set_step(terms.arguments.step());
  request.set_rng_seed(terms.rng_seed);
  ASSIGN_OR_RETURN(const v1::ApplyGradientsResponse made,
                   resources_->steps->ApplyGradients(request, context));
  if (!made.replayed()) looked_up.looked_up->LeaveToShards();
  v1::MadeUpdate result;
  result.set_rows_updated(made.rows_updated());
  result.set_rows_skipped(made.rows_skipped());
  result.set_replayed(made.replayed());
  return result;
}

absl::StatusOr<ValuePtr> ProgramRunner::Elementwise(const Program& program,
                                                    const std::vector<ValuePtr>& arguments) {
  std::vector<Tensors> tensors;
  for (size_t i = 0; i < arguments.size(); ++i) {
    tensors.push_back(arguments[i]->tensors);
    RETURN_IF_ERROR(CheckArgument(program.spec(), static_cast<int>(i), tensors.back()));
  }
  ASSIGN_OR_RETURN(const int64_t bytes, ResultBytes(program.spec(), tensors));
  return MakeTuple(store(), bytes, [&] { return Compute(program.spec(), tensors); });
}

}  // namespace emberd::coordinator
