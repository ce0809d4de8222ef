#include "server/coordinator/programs/chains.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/program_spec.h"
#include "server/coordinator/unary_calls.h"
#include "server/host/mutation_votes.h"
#include "server/rpc/call_context.h"
#include "server/step/request_reader.h"

namespace emberd::coordinator {
namespace {

using v1::ChainedInput;
using v1::ChainedOp;
using v1::ChainedOutput;
using v1::ProgramSpec;

constexpr int kMaxResultIndex = 4095;

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
  // The memory of the batch belongs to the preprocessor that made it.
  const auto owner = std::make_shared<step::PreparedLookup>(prepared);
  result.batch = {owner, prepared.batch.get()};
  result.model = now;
  return result;
}

absl::Status CheckCaller(rpc::CallContext* context) {
  if (context->cancelled()) return absl::CancelledError("the caller is gone");
  if (context->deadline() >= SteadyNow()) return absl::OkStatus();
  return absl::DeadlineExceededError("the deadline of the call has passed");
}

int ArityOf(const ProgramSpec& spec) {
  switch (spec.kind()) {
    case ProgramSpec::LOOKUP:
      return 1;
    case ProgramSpec::UPDATE:
      return 2;
    default:
      return spec.inputs_size();
  }
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

absl::StatusOr<ValuePtr> ProgramRunner::Prepare(const ProgramPtr& program, v1::Literal batch,
                                                Handles* handles, rpc::CallContext* context) {
  if (program->kind() != v1::ProgramSpec::LOOKUP) {
    ASSIGN_OR_RETURN(const ValuePtr tuple, ReadTuple(store(), handles, std::move(batch)));
    if (program->kind() == v1::ProgramSpec::UPDATE) {
      RETURN_IF_ERROR(CheckGradients(program->spec(), tuple->tensors));
    }
    return tuple;
  }
  ASSIGN_OR_RETURN(const auto model, Find(*program, context));
  ASSIGN_OR_RETURN(const v1::LookupRequest request,
                   BatchRequest(program->spec(), *model, std::move(batch)));
  step::StepHooks no_hooks;
  v1::StepTimes times;
  ASSIGN_OR_RETURN(
      step::PreparedLookup prepared,
      resources_->path->Prepare(model, request, /*later=*/true, context, &no_hooks, &times));
  auto value = std::make_shared<Value>();
  ASSIGN_OR_RETURN(auto share, store()->Reserve(prepared.batch->bytes()));
  value->shares.push_back(std::move(share));
  value->statistics = std::make_shared<const v1::BatchStatistics>(prepared.batch->statistics());
  value->prepared = std::move(prepared);
  value->prepared_for = program;
  return value;
}

absl::StatusOr<ValuePtr> ProgramRunner::Lookup(const ValuePtr& batch, rpc::CallContext* context) {
  const Program& program = *batch->prepared_for;
  step::ServedModelPtr model;
  auto found = resources_->registry->OnModel(
      [&] { return Find(program, context); },
      [&](const step::ServedModelPtr& now) {
        model = now;
        OwnedBatch owned;
        v1::StepTimes times;
        return resources_->path->LookUp(ForModel(*batch->prepared, now), program.spec().inference(),
                                        context, &owned, &times);
      });
  if (!found.ok()) return found.status();
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
  value->batch = batch;
  for (size_t i = 0; i < value->tensors.size(); ++i) value->places.push_back(static_cast<int>(i));
  value->statistics = std::make_shared<const v1::BatchStatistics>(std::move(found->statistics));
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
  host::SetRowCounts(host::RowCountsOf(made), &result);
  result.set_replayed(made.replayed());
  return result;
}

absl::StatusOr<ValuePtr> ProgramRunner::Elementwise(const Program& program,
                                                    const std::vector<ValuePtr>& arguments) {
  std::vector<Tensors> tensors;
  std::vector<int> counts;
  for (size_t i = 0; i < arguments.size(); ++i) {
    tensors.push_back(arguments[i]->tensors);
    counts.push_back(static_cast<int>(tensors.back().size()));
    // Under a handle, what is computed of it would be a tuple of none: zero gradients.
    if (counts.back() == 0 && arguments[i]->looked_up != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "argument[", i,
          "] is the batch of a LOOKUP alone, without tensors; give the values that it returned"));
    }
    RETURN_IF_ERROR(CheckArgument(program.spec(), static_cast<int>(i), tensors.back()));
  }
  RETURN_IF_ERROR(CountResults(program.spec(), counts).status());
  ASSIGN_OR_RETURN(const std::vector<int64_t> bytes, ResultBytes(program.spec(), tensors));
  return MakeTuple(store(), bytes, [&] { return Compute(program.spec(), tensors); });
}

absl::Status Chain::Check(rpc::CallContext* context) {
  rpc::Span span(context, "set_up");
  RETURN_IF_ERROR(CheckPositions());
  for (int p = 0; p < request_.ops_size(); ++p) {
    absl::Status status = CheckOp(p, context);
    if (status.ok()) continue;
    if (chained_) status = Annotate(status, absl::StrCat("op ", p));
    span.End(status);
    return status;
  }
  return MakeRoom(context);
}

absl::Status Chain::CheckPositions() {
  ops_.resize(request_.ops_size());
  int results = 0;
  for (int p = 0; p < request_.ops_size(); ++p) {
    const ChainedOp& op = request_.ops(p);
    if (op.kind_case() == ChainedOp::KIND_NOT_SET) {
      return absl::InvalidArgumentError(
          absl::StrCat("Undefined operation kind at post-order position ", p));
    }
    for (const ChainedInput& input : op.inputs()) {
      if (input.op_index() >= p) {
        return absl::InvalidArgumentError(
            absl::StrCat("Input index ", input.op_index(), " is above the current position: ", p));
      }
      if (input.op_index() < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("Input index ", input.op_index(), " at position ", p, " is below 0"));
      }
      ++ops_[input.op_index()].uses;
    }
    for (const ChainedOutput& output : op.outputs()) {
      if (output.result_index() < 0 || output.result_index() > kMaxResultIndex) {
        return absl::InvalidArgumentError(absl::StrCat("op ", p, ": result_index is ",
                                                       output.result_index(), "; allowed: [0, ",
                                                       kMaxResultIndex, "]"));
      }
      results = std::max(results, output.result_index() + 1);
    }
  }
  results_.resize(results);
  answer_bytes_.resize(results);
  return absl::OkStatus();
}

absl::Status Chain::CheckOp(int position, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckCaller(context));
  if (request_.ops(position).has_program_handle()) {
    RETURN_IF_ERROR(CheckProgram(position, context));
  } else {
    RETURN_IF_ERROR(CheckData(position));
  }
  const ProgramPtr& program = ops_[position].program;
  const bool updates = program != nullptr && program->kind() == ProgramSpec::UPDATE;
  if (!updates && request_.ops(position).update().hyperparameters_size() > 0) {
    return absl::InvalidArgumentError("update.hyperparameters is set; only an UPDATE has any");
  }
  return CheckOutputs(position);
}

absl::Status Chain::CheckData(int position) {
  ChainedOp& data = *request_.mutable_ops(position);
  Op& op = ops_[position];
  if (data.inputs_size() > 0) {
    return absl::InvalidArgumentError("data has inputs; only programs have");
  }
  if (data.has_literal() && data.literal().features_size() > 0) {
    op.makes = Op::Makes::kLiteralBatch;  // which program it is for shows later
    return absl::OkStatus();
  }
  if (data.has_literal()) {
    ASSIGN_OR_RETURN(op.value,
                     ReadTuple(runner_->store(), handles_, std::move(*data.mutable_literal())));
  } else if (!data_.contains(data.data_handle())) {
    ASSIGN_OR_RETURN(ValuePtr value, handles_->Find(data.data_handle()));
    data_[data.data_handle()] = std::move(value);
  }
  ASSIGN_OR_RETURN(op, PartOf(position, ChainedInput()));
  if (data.has_data_handle()) op.value = nullptr;  // it is in data_
  return absl::OkStatus();
}

template <typename Place>
absl::StatusOr<Chain::Op> Chain::PartOf(int op, const Place& place) const {
  Op part = ops_[op];
  part.value = ValueOf(op);
  const std::string what = absl::StrCat("op ", op);
  if (part.value != nullptr) {  // data
    ASSIGN_OR_RETURN(part.value, ElementAt(part.value, place, what));
    const Value& value = *part.value;
    part.makes = value.prepared.has_value() ? Op::Makes::kBatch
                 : !value.elements.empty()  ? Op::Makes::kTupleOfTuples
                 : value.program != nullptr ? Op::Makes::kNothing
                                            : Op::Makes::kTuple;
    part.tensors = static_cast<int>(value.tensors.size());
    part.lookup = value.looked_up.get();
    part.lookup_model = part.lookup == nullptr ? 0 : value.looked_up->model_id();
    return part;
  }
  if (part.program != nullptr && part.makes == Op::Makes::kNothing) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is an UPDATE, which has no result"));
  }
  const bool inner = place.inner_size() > 0;
  if (place.output_index() < 0 || place.output_index() > part.tensors || inner) {
    return absl::InvalidArgumentError(absl::StrCat("output_index ", place.output_index(), " of ",
                                                   what, "; allowed: [0, ", part.tensors, "]",
                                                   inner ? ", and nothing inner" : ""));
  }
  if (place.output_index() > 0) {
    part.tensors = 1;
    part.part = place.output_index();
  }
  return part;
}

absl::Status Chain::CheckProgram(int position, rpc::CallContext* context) {
  const ChainedOp& request = request_.ops(position);
  Op& op = ops_[position];
  {
    rpc::Span span(context, "find_program");
    ASSIGN_OR_RETURN(op.program, programs_->Find(request.program_handle(), handles_));
  }
  const ProgramSpec& spec = op.program->spec();
  if (request.inputs_size() != ArityOf(spec)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Number of inputs does not match executable proto input shapes: ", request.inputs_size(),
        " vs. ", ArityOf(spec)));
  }
  std::vector<Op> arguments;
  for (const ChainedInput& input : request.inputs()) {
    ASSIGN_OR_RETURN(Op argument, PartOf(input.op_index(), input));
    arguments.push_back(std::move(argument));
  }
  switch (spec.kind()) {
    case ProgramSpec::LOOKUP:
      return CheckLookup(position, arguments[0], context);
    case ProgramSpec::UPDATE:
      return CheckUpdate(position, arguments[0], arguments[1]);
    default:
      return CheckElementwise(position, arguments);
  }
}

absl::Status Chain::CheckLookup(int position, const Op& batch, rpc::CallContext* context) {
  Op& op = ops_[position];
  if (batch.makes == Op::Makes::kLiteralBatch) {
    rpc::Span span(context, "prepare_batch");
    const int source = request_.ops(position).inputs(0).op_index();
    ASSIGN_OR_RETURN(
        op.batch, runner_->Prepare(op.program, request_.ops(source).literal(), handles_, context));
  } else if (batch.makes != Op::Makes::kBatch) {
    return absl::InvalidArgumentError(
        "argument[0] of a LOOKUP is not a batch; PrepareBatch makes one");
  } else if (batch.value->prepared_for->key() != op.program->key()) {
    return absl::InvalidArgumentError(
        "argument[0] is a batch that was prepared for another program; prepare it for this one");
  } else {
    op.batch = batch.value;
  }
  op.makes = Op::Makes::kTuple;
  op.tensors = op.program->spec().inputs_size();
  if (!op.program->spec().inference()) {
    op.lookup_model = op.program->model_id();
    op.lookup = &op;
  }
  return absl::OkStatus();
}

absl::Status Chain::CheckUpdate(int position, const Op& found, const Op& gradients) {
  Op& op = ops_[position];
  if (found.lookup_model != op.program->model_id()) {
    return absl::InvalidArgumentError(
        absl::StrCat("argument[0] of an UPDATE is not what a LOOKUP of model '",
                     op.program->spec().model(), "' (with inference false) returned"));
  }
  // A batch alone has no tensors, nor has what is computed of it: all gradients would be zero.
  const bool found_none = gradients.lookup != nullptr || gradients.program != nullptr;
  if (gradients.makes != Op::Makes::kTuple || (found_none && gradients.tensors == 0)) {
    return absl::InvalidArgumentError("argument[1] of an UPDATE is not a tuple of gradients");
  }
  if (const auto other = updated_.find(found.lookup); other != updated_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the batch of op ", request_.ops(position).inputs(0).op_index(), " is updated by op ",
        other->second, " already; a batch is updated only once"));
  }
  if (op.program->spec().aliases().empty()) {
    updated_[found.lookup] = position;
  } else {
    op.batch = found.value == nullptr ? found.batch : found.value->batch.lock();
    if (op.batch == nullptr) {
      return absl::FailedPreconditionError(
          "argument[0] cannot be donated: its batch, which would be looked up again, is gone. Keep "
          "its handle (PrepareBatch), or look it up in the same chain");
    }
  }
  if (!request_.config().execution_instance_key().client_id().empty() ||
      request_.config().execution_instance_key().sequence() != 0) {
    const v1::MutationId name = MutationOf(position);
    RETURN_IF_ERROR(Annotate(host::CheckMutation({name.client_id(), name.sequence(), 0}),
                             "execution_instance_key"));
  }
  if (gradients.value == nullptr) return absl::OkStatus();  // checked when it is there
  return CheckGradients(op.program->spec(), gradients.value->tensors);
}

absl::Status Chain::CheckElementwise(int position, const std::vector<Op>& arguments) {
  Op& op = ops_[position];
  std::vector<int> counts;
  for (const Op& argument : arguments) {
    const auto i = static_cast<int>(counts.size());
    if (argument.makes != Op::Makes::kTuple) {
      return absl::InvalidArgumentError(
          absl::StrCat("argument[", i, "] is not a tuple of tensors"));
    }
    counts.push_back(argument.tensors);
    if (argument.value == nullptr) continue;
    RETURN_IF_ERROR(CheckArgument(op.program->spec(), i, argument.value->tensors));
  }
  ASSIGN_OR_RETURN(op.tensors, CountResults(op.program->spec(), counts));
  op.makes = Op::Makes::kTuple;
  for (const v1::ElementwiseOutput& output : op.program->spec().outputs()) {
    if (output.has_size()) continue;  // known when it runs
    op.bytes += KnownBytes(arguments[output.a().argument()], output.a().output_index());
  }
  for (const v1::ProgramAlias& alias : op.program->spec().aliases()) {
    if (alias.output() >= op.tensors || alias.tensor() >= counts[alias.argument()]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "aliases: tensor ", alias.tensor(), " of argument[", alias.argument(), "] of ",
          counts[alias.argument()], ", is donated to output ", alias.output(), " of ", op.tensors));
    }
  }
  return absl::OkStatus();
}

int64_t Chain::KnownBytes(const Op& part, int tensor) {
  const int only = part.part > 0 ? part.part : tensor;
  int64_t bytes = 0;
  if (part.value != nullptr) {
    const Tensors& tensors = part.value->tensors;
    if (tensor > 0) return TensorBytes(*tensors[tensor - 1]);
    for (const auto& one : tensors) bytes += TensorBytes(*one);
  } else if (part.batch != nullptr && part.batch->prepared.has_value()) {  // a LOOKUP
    const step::PreparedLookup& prepared = *part.batch->prepared;
    for (int i = 0; i < part.program->spec().inputs_size(); ++i) {
      if (only > 0 && only != i + 1) continue;
      const int feature = prepared.order[i];
      int64_t size = step::ElementSize(prepared.activation_dtype);
      for (const int64_t extent :
           prepared.model->ActivationShape(feature, prepared.batch->feature_samples()[feature])) {
        size *= extent;
      }
      bytes += size;
    }
  } else if (only == 0) {
    bytes = part.bytes;
  }
  return bytes;
}

absl::Status Chain::CountAnswer(const ChainedOutput& output, int64_t bytes) {
  int64_t& counted = answer_bytes_[output.result_index()];
  answer_bytes_of_all_ += bytes - counted;
  counted = bytes;
  if (answer_bytes_of_all_ <= max_answer_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the results take ", answer_bytes_of_all_,
                   " bytes of the answer; budgets.max_message_bytes is ", max_answer_bytes_,
                   ". Without return_values, they stay under handles"));
}

absl::Status Chain::MakeRoom(rpc::CallContext* context) {
  if (answer_bytes_of_all_ <= room_bytes_) return absl::OkStatus();
  // The answer, and the message that is made of it.
  const int64_t more = 2 * (answer_bytes_of_all_ - room_bytes_);
  room_bytes_ = answer_bytes_of_all_;
  return context->MakeRoom(more, "the answer").status();
}

absl::Status Chain::CheckOutputs(int position) {
  for (const ChainedOutput& output : request_.ops(position).outputs()) {
    if (ops_[position].makes == Op::Makes::kLiteralBatch) {
      return absl::InvalidArgumentError(
          "outputs: the batch was not prepared for a program; PrepareBatch prepares one");
    }
    ASSIGN_OR_RETURN(const Op part, PartOf(position, output));
    if (!request_.config().return_values()) continue;
    RETURN_IF_ERROR(CountAnswer(output, KnownBytes(part, 0)));
  }
  return absl::OkStatus();
}

bool Chain::looks_up() const {
  return std::any_of(ops_.begin(), ops_.end(), [](const Op& op) {
    return op.program != nullptr && op.program->kind() == ProgramSpec::LOOKUP;
  });
}

int64_t Chain::handles() const {
  const v1::ExecutionConfig& config = request_.config();
  int64_t handles = 0;
  for (size_t p = 0; p < ops_.size(); ++p) {
    if (!config.return_values() || ops_[p].lookup_model != 0 ||
        ops_[p].makes == Op::Makes::kTupleOfTuples) {
      handles += int64_t{request_.ops(static_cast<int>(p)).outputs_size()} *
                 (config.return_exploded() ? std::max(ops_[p].tensors, 1) : 1);
    }
  }
  return handles;
}

v1::MutationId Chain::MutationOf(int position) const {
  v1::MutationId name = request_.config().execution_instance_key();
  if (chained_ && !name.client_id().empty()) {
    name.set_client_id(absl::StrCat(name.client_id(), "#", position));
  }
  return name;
}

const ValuePtr& Chain::ValueOf(int position) const {
  const ChainedOp& op = request_.ops(position);
  return op.has_data_handle() ? data_.at(op.data_handle()) : ops_[position].value;
}

absl::StatusOr<std::vector<ValuePtr>> Chain::Arguments(int position) const {
  std::vector<ValuePtr> arguments;
  for (const ChainedInput& input : request_.ops(position).inputs()) {
    ASSIGN_OR_RETURN(ValuePtr argument, ElementAt(ValueOf(input.op_index()), input,
                                                  absl::StrCat("op ", input.op_index())));
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

absl::Status Chain::Run(rpc::CallContext* context) {
  rpc::Span span(context, "run");
  for (int p = 0; p < request_.ops_size(); ++p) {
    absl::Status status = RunOp(p, context);
    if (status.ok()) continue;
    if (!chained_) return status;
    const std::string made =
        absl::StrJoin(updates_, ", ", [](std::string* out, const v1::MadeUpdate& update) {
          absl::StrAppend(out, "op ", update.op_index());
        });
    return absl::Status(
        status.code(),
        absl::StrCat("op ", p, ": ", status.message(), "; ",
                     made.empty() ? "no update was applied before it"
                                  : absl::StrCat("updates that were applied before it: ", made,
                                                 "; a repeat with the same execution_instance_key "
                                                 "applies the others, each exactly once")));
  }
  for (const uint64_t handle : donated_) handles_->Replace(handle, data_.at(handle));
  return absl::OkStatus();
}

absl::Status Chain::RunOp(int position, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckCaller(context));
  Op& op = ops_[position];
  if (op.program != nullptr) {
    const ProgramSpec& spec = op.program->spec();
    rpc::Span span(context, ProgramSpec::Kind_Name(spec.kind()));
    span.Set("emberd.op_index", position);
    span.Set("emberd.program_handle", absl::StrCat(request_.ops(position).program_handle()));
    if (!spec.model().empty()) span.Set("emberd.model", spec.model());
    if (request_.ops(position).update().has_step()) {
      span.Set("emberd.step", request_.ops(position).update().step());
    }
    switch (op.program->kind()) {
      case ProgramSpec::LOOKUP: {
        ASSIGN_OR_RETURN(op.value, runner_->Lookup(op.batch, context));
        op.batch = nullptr;
        break;
      }
      case ProgramSpec::UPDATE: {
        ASSIGN_OR_RETURN(const std::vector<ValuePtr> arguments, Arguments(position));
        ASSIGN_OR_RETURN(v1::MadeUpdate made,
                         runner_->Update(*op.program, *arguments[0], *arguments[1],
                                         {.arguments = request_.ops(position).update(),
                                          .mutation = MutationOf(position),
                                          .rng_seed = request_.config().rng_seed()},
                                         context));
        if (chained_) made.set_op_index(position);
        updates_.push_back(std::move(made));
        if (op.batch != nullptr) RETURN_IF_ERROR(LookUpAgain(position, *arguments[0], context));
        break;
      }
      default: {
        ASSIGN_OR_RETURN(const std::vector<ValuePtr> arguments, Arguments(position));
        ASSIGN_OR_RETURN(op.value, runner_->Elementwise(*op.program, arguments));
        Donate(position);
        break;
      }
    }
  }
  RETURN_IF_ERROR(TakeOutputs(position, context));
  rpc::Span span(op.program == nullptr ? nullptr : context, "free");
  for (const ChainedInput& input : request_.ops(position).inputs()) {
    Op& source = ops_[input.op_index()];
    if (--source.uses == 0) source.value = nullptr;
  }
  if (op.uses == 0) op.value = nullptr;
  return absl::OkStatus();
}

void Chain::Donate(int position) {
  const ChainedOp& op = request_.ops(position);
  const Value& result = *ops_[position].value;
  for (const v1::ProgramAlias& alias : ops_[position].program->spec().aliases()) {
    const ChainedInput& input = op.inputs(alias.argument());
    const ChainedOp& data = request_.ops(input.op_index());
    if (!data.has_data_handle() || input.output_index() != 0 || input.inner_size() > 0) continue;
    ValuePtr& source = data_.at(data.data_handle());
    const auto value = std::make_shared<Value>(*source);
    value->tensors[alias.tensor()] = result.tensors[alias.output()];
    if (!value->places.empty()) value->places[alias.tensor()] = -1;
    source = value;
    donated_.insert(data.data_handle());
  }
}

absl::Status Chain::LookUpAgain(int position, const Value& before, rpc::CallContext* context) {
  const auto found = runner_->Lookup(ops_[position].batch, context);
  if (!found.ok()) {
    return Annotate(found.status(), "the update was applied, but its batch not looked up again");
  }
  const std::function<bool(ValuePtr*)> renew = [&](ValuePtr* value) {
    if (*value == nullptr) return false;
    if (!(*value)->elements.empty()) {
      const auto now = std::make_shared<Value>(**value);
      bool renewed = false;
      for (ValuePtr& element : now->elements) renewed |= renew(&element);
      if (renewed) *value = now;
      return renewed;
    }
    if ((*value)->looked_up != before.looked_up) return false;
    *value = Renewed(**value, **found);
    return true;
  };
  for (auto& [handle, value] : data_) {
    if (renew(&value)) donated_.insert(handle);
  }
  for (Op& op : ops_) renew(&op.value);
  for (ValuePtr& result : results_) renew(&result);
  return absl::OkStatus();
}

absl::Status Chain::TakeOutputs(int position, rpc::CallContext* context) {
  const v1::ExecutionConfig& config = request_.config();
  for (const ChainedOutput& output : request_.ops(position).outputs()) {
    ASSIGN_OR_RETURN(const ValuePtr result,
                     ElementAt(ValueOf(position), output, absl::StrCat("op ", position)));
    results_[output.result_index()] = result;
    int64_t bytes = 0;
    if (result->statistics != nullptr) {  // with each result
      const auto times = config.return_exploded() ? std::max<size_t>(result->tensors.size(), 1) : 1;
      bytes += static_cast<int64_t>(times * result->statistics->ByteSizeLong());
    }
    if (config.return_values()) {
      for (const auto& tensor : result->tensors) bytes += TensorBytes(*tensor);
    }
    RETURN_IF_ERROR(CountAnswer(output, bytes));
  }
  return MakeRoom(context);
}

}  // namespace emberd::coordinator
