#include "server/coordinator/programs/programs.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/program_spec.h"
#include "server/host/mutation_votes.h"
#include "server/ops/metrics.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {
namespace {

constexpr absl::Duration kProgramSweep = absl::Seconds(1);
constexpr size_t kMaxClientBytes = 64;

absl::Status CheckClient(const std::string& client) {
  if (!client.empty() && client.size() <= kMaxClientBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("client_id has ", client.size(),
                                                 " bytes; it must have 1 to ", kMaxClientBytes,
                                                 ": it owns the new handles"));
}

const std::string& ClientOf(const v1::ExecutionConfig& config) {
  return config.client_id().empty() ? config.execution_instance_key().client_id()
                                    : config.client_id();
}

// The plan of one program: its arguments, then itself.
v1::ExecuteChainedRequest PlanOf(v1::ExecuteRequest* request, bool has_result) {
  v1::ExecuteChainedRequest plan;
  v1::ChainedOp program;
  program.set_program_handle(request->program_handle());
  *program.mutable_update() = request->update();
  for (v1::ProgramArgument& argument : *request->mutable_arguments()) {
    v1::ChainedInput* input = program.add_inputs();
    input->set_op_index(plan.ops_size());
    input->set_output_index(argument.output_index());
    *input->mutable_inner() = argument.inner();
    v1::ChainedOp* data = plan.add_ops();
    if (argument.has_literal()) {
      *data->mutable_literal() = std::move(*argument.mutable_literal());
    } else {
      data->set_data_handle(argument.handle());
    }
  }
  if (has_result) program.add_outputs();
  *plan.add_ops() = std::move(program);
  *plan.mutable_config() = request->config();
  return plan;
}

std::vector<uint64_t> InputHandles(const v1::ExecuteRequest& request) {
  std::vector<uint64_t> handles;
  for (const v1::ProgramArgument& argument : request.arguments()) {
    const uint64_t handle = argument.handle();
    if (argument.has_handle() && std::find(handles.begin(), handles.end(), handle) == handles.end())
      handles.push_back(handle);
  }
  return handles;
}

std::vector<uint64_t> ListOf(const google::protobuf::RepeatedField<uint64_t>& handles) {
  return {handles.begin(), handles.end()};
}

template <typename Message>
void AddTensors(const Value& value, Message* to) {
  for (const auto& tensor : value.tensors) *to->add_values() = *tensor;
}

template <typename Message>
void AddStatistics(const Value& value, Message* to) {
  v1::BatchStatistics* const statistics = to->mutable_statistics();
  if (value.statistics != nullptr) *statistics = *value.statistics;
}

void AddValue(const Value& value, v1::ReadHandleResponse* to) {
  AddTensors(value, to);
  AddStatistics(value, to);
  to->set_bytes(value.bytes());
  for (const ValuePtr& element : value.elements) AddValue(*element, to->add_elements());
}

template <typename T>
void AddArray(const std::string& name, v1::DataType dtype, const std::vector<T>& values,
              v1::ReadHandleResponse* to) {
  v1::NamedTensor* const array = to->add_values();
  array->set_name(name);
  array->mutable_tensor()->set_dtype(dtype);
  array->mutable_tensor()->add_shape(static_cast<int64_t>(values.size()));
  array->mutable_tensor()->set_data(values.data(), values.size() * sizeof(T));
}

void AddCsr(const preprocess::Plan& plan, const preprocess::PreprocessedBatch& batch,
            v1::ReadHandleResponse* to) {
  for (int k = 0; k < static_cast<int>(plan.stacks.size()); ++k) {
    const std::string prefix = plan.stacks[k].name + "/";
    const preprocess::ChipCsr csr = preprocess::MakeChipCsr(batch.slots(k));
    AddArray(prefix + "row_pointers", v1::INT32, csr.row_pointers, to);
    AddArray(prefix + "sorted_sample_ids", v1::INT32, csr.sample_ids, to);
    AddArray(prefix + "sorted_token_ids", v1::INT32, csr.token_ids, to);
    AddArray(prefix + "sorted_gains", v1::FLOAT32, csr.gains, to);
  }
  AddArray("splits", v1::INT64, std::vector{preprocess::TensorFlowMask(batch.cuts())}, to);
  to->mutable_values()->rbegin()->mutable_tensor()->clear_shape();
}

// RESOURCE_EXHAUSTED: a SparseCore could not hold the program's buffers beside the model's rows,
// however many other models left it.
absl::Status CheckFits(const v1::CompileResponse& program, const step::ServedModel& model,
                       int64_t bytes_per_sparsecore) {
  int64_t rows = 0;
  const v1::ModelPlan plan = preprocess::PlanToProto(model.config, model.plan);
  for (const v1::StackPlan& stack : plan.stacks()) rows += stack.bytes_per_partition();
  const int64_t buffers = program.bytes_per_sparsecore();
  if (buffers <= bytes_per_sparsecore - rows) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the buffers of the program need ", buffers, " bytes of each SparseCore beside ", rows,
      " of the rows of model '", model.config.name(), "'; budgets.bytes_per_sparsecore is ",
      bytes_per_sparsecore, ". Lower max_samples or max_ids_per_chip_per_sample"));
}

}  // namespace

Programs::Programs(const CoordinatorResources* resources, const ProgramOptions& options)
    : resources_(resources),
      options_(options),
      runner_(resources),
      programs_({.lease = options.lease,
                 .new_handle = [index = options.coordinator_index] { return NewHandle(index); }}),
      handles_(options.coordinator_index, options.lease),
      sweeper_(kProgramSweep, [this] { Sweep(); }) {}

void Programs::Sweep() {
  const absl::Time now = SteadyNow();
  programs_.Sweep(now);
  resources_->server_metrics->Add(ops::MetricId::kProgramHandlesExpired, handles_.Sweep(now));
  Count();
}

void Programs::Count() {
  ops::ServerMetrics* const metrics = resources_->server_metrics;
  metrics->Set(ops::MetricId::kPrograms, programs_.count());
  metrics->Set(ops::MetricId::kProgramHandles, handles_.count());
}

absl::StatusOr<v1::CompileResponse> Programs::Compile(const v1::CompileRequest& request,
                                                      rpc::CallContext* context) {
  if (!request.client_id().empty()) RETURN_IF_ERROR(CheckClient(request.client_id()));
  step::ServedModelPtr model;
  if (request.spec().kind() != v1::ProgramSpec::ELEMENTWISE) {
    ASSIGN_OR_RETURN(model, resources_->registry->FindByName(request.spec().model(), context));
  }
  ASSIGN_OR_RETURN(v1::ProgramSpec spec, CompleteSpec(request.spec(), model.get()));
  const std::string key = ProgramKey(spec, model.get());
  ASSIGN_OR_RETURN(const ProgramCache::Compiled compiled, programs_.Compile(key, [&] {
    resources_->server_metrics->Add(ops::MetricId::kProgramCompilations);
    auto program = Program::Compile(std::move(spec), key, model, options_.cpu);
    if (!program.ok() || model == nullptr) return program;
    const absl::Status fits = CheckFits((*program)->info(), *model, options_.bytes_per_sparsecore);
    return fits.ok() ? program : absl::StatusOr<ProgramPtr>(fits);
  }));
  v1::CompileResponse response = compiled.program->info();
  response.set_program_handle(compiled.handle);
  response.set_cached(compiled.cached);
  response.set_lease_ms(absl::ToInt64Milliseconds(options_.lease));
  if (!request.client_id().empty()) {
    RETURN_IF_ERROR(programs_.Release({compiled.handle}));
    ASSIGN_OR_RETURN(const auto own, MakeTuple(runner_.store(), Tensors()));
    own->program = compiled.program;
    response.set_program_handle(handles_.Insert(request.client_id(), own));
  }
  Count();
  return response;
}

absl::StatusOr<v1::ReleaseResponse> Programs::Release(const v1::ReleaseRequest& request,
                                                      rpc::CallContext*) {
  const std::vector<uint64_t> handles = ListOf(request.handles());
  if (request.client_id().empty()) RETURN_IF_ERROR(handles_.CheckRelease(handles));
  handles_.Renew(request.client_id());
  RETURN_IF_ERROR(programs_.Release(ListOf(request.program_handles())));
  v1::ReleaseResponse response;
  response.set_released(request.program_handles_size() + handles_.Release(handles));
  if (!request.all_of_client().empty()) {
    response.set_released(response.released() + handles_.ReleaseClient(request.all_of_client()));
  }
  Count();
  return response;
}

absl::StatusOr<v1::PrepareBatchResponse> Programs::PrepareBatch(v1::PrepareBatchRequest request,
                                                                rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckClient(request.client_id()));
  ASSIGN_OR_RETURN(const auto program, programs_.Find(request.program_handle(), &handles_));
  ASSIGN_OR_RETURN(ValuePtr value, runner_.Prepare(program, std::move(*request.mutable_batch()),
                                                   &handles_, context));
  v1::PrepareBatchResponse response;
  AddStatistics(*value, &response);
  response.set_handle(handles_.Insert(request.client_id(), std::move(value)));
  Count();
  return response;
}

absl::StatusOr<rpc::BudgetShare> Programs::Run(const v1::ExecutionConfig& config, Chain* chain,
                                               rpc::CallContext* context) {
  RETURN_IF_ERROR(chain->Check(context));
  if (options_.draining != nullptr && options_.draining->load() && chain->looks_up()) {
    return absl::UnavailableError(
        "the coordinator is draining; look up at another one. An update of what was looked up here "
        "is still made, by a call without a LOOKUP");
  }
  if (chain->handles() > 0) RETURN_IF_ERROR(CheckClient(ClientOf(config)));
  handles_.Renew(ClientOf(config));
  // Before anything changes.
  ASSIGN_OR_RETURN(auto share, runner_.store()->Reserve(kHandleBytes * chain->handles()));
  RETURN_IF_ERROR(chain->Run(context));
  return share;
}

v1::ProgramResult Programs::Give(const v1::ExecutionConfig& config, const ValuePtr& value,
                                 const rpc::BudgetShare& share) {
  v1::ProgramResult result;
  AddStatistics(*value, &result);
  if (!config.return_values() || !value->elements.empty()) {
    result.set_handle(handles_.Insert(ClientOf(config), value, share));
    return result;
  }
  AddTensors(*value, &result);
  if (value->looked_up != nullptr) {
    result.set_handle(handles_.Insert(ClientOf(config), BatchAlone(*value), share));
  }
  return result;
}

absl::StatusOr<v1::ExecuteResponse> Programs::Execute(v1::ExecuteRequest request,
                                                      rpc::CallContext* context) {
  const v1::ExecutionConfig config = request.config();
  ASSIGN_OR_RETURN(const auto program, programs_.Find(request.program_handle(), &handles_));
  const std::vector<uint64_t> inputs = InputHandles(request);
  const bool has_result = program->kind() != v1::ProgramSpec::UPDATE;
  // A client's own handle is one of its values.
  if (config.release_program_handle() && !handles_.CheckRelease({request.program_handle()}).ok()) {
    const absl::Status may = programs_.CheckRelease({request.program_handle()});
    // It may be the repeat of an update that has given the last reference back.
    if (!may.ok() && !has_result) return Repeat(request, *program, may, context);
    RETURN_IF_ERROR(may);
  }
  Chain chain(&runner_, &programs_, &handles_, PlanOf(&request, has_result), /*chained=*/false,
              options_.max_message_bytes);
  const absl::StatusOr<rpc::BudgetShare> share = Run(config, &chain, context);
  if (absl::IsNotFound(share.status()) && !has_result) {
    return Repeat(request, *program, share.status(), context);
  }
  RETURN_IF_ERROR(share.status());
  v1::ExecuteResponse response;
  for (const ValuePtr& whole : chain.results()) {
    const int parts = config.return_exploded() ? static_cast<int>(whole->tensors.size()) : 0;
    for (int k = parts == 0 ? 0 : 1; k <= parts; ++k) {
      ASSIGN_OR_RETURN(const ValuePtr part, ElementOf(whole, k, "the result"));
      *response.add_results() = Give(config, part, *share);
    }
  }
  response.mutable_updates()->Assign(chain.updates().begin(), chain.updates().end());
  if (config.release_input_handles()) handles_.Release(inputs);
  // Somebody else may have given the reference back meanwhile.
  if (config.release_program_handle() && handles_.Release({request.program_handle()}) == 0) {
    (void)programs_.Release({request.program_handle()});
  }
  Count();
  return response;
}

absl::StatusOr<v1::ExecuteResponse> Programs::Repeat(const v1::ExecuteRequest& request,
                                                     const Program& program,
                                                     const absl::Status& no_handle,
                                                     rpc::CallContext* context) {
  const v1::MutationId& key = request.config().execution_instance_key();
  const host::Mutation mutation{key.client_id(), key.sequence(),
                                host::UpdateTag(program.model_id())};
  if (!host::CheckMutation(mutation).ok()) return no_handle;
  ASSIGN_OR_RETURN(const std::optional<host::RowCounts> rows,
                   resources_->mutations->Find(mutation, context));
  if (!rows.has_value()) return no_handle;
  resources_->server_metrics->Add(ops::MetricId::kReplays);
  v1::ExecuteResponse response;
  v1::MadeUpdate* const made = response.add_updates();
  host::SetRowCounts(*rows, made);
  made->set_replayed(true);
  return response;
}

absl::StatusOr<v1::ExecuteChainedResponse> Programs::ExecuteChained(
    v1::ExecuteChainedRequest request, rpc::CallContext* context) {
  const v1::ExecutionConfig config = request.config();
  if (config.release_input_handles() || config.release_program_handle() ||
      config.return_exploded()) {
    return absl::InvalidArgumentError(
        "config: release_input_handles, release_program_handle and return_exploded are for "
        "Execute; a chain releases no handles and says itself what it returns");
  }
  Chain chain(&runner_, &programs_, &handles_, std::move(request), /*chained=*/true,
              options_.max_message_bytes);
  ASSIGN_OR_RETURN(const rpc::BudgetShare share, Run(config, &chain, context));
  v1::ExecuteChainedResponse response;
  for (const ValuePtr& result : chain.results()) {
    v1::ProgramResult* to = response.add_results();
    if (result != nullptr) *to = Give(config, result, share);
  }
  response.mutable_updates()->Assign(chain.updates().begin(), chain.updates().end());
  Count();
  return response;
}

absl::StatusOr<v1::ReadHandleResponse> Programs::ReadHandle(const v1::ReadHandleRequest& request,
                                                            rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const ValuePtr whole, handles_.Find(request.handle()));
  ASSIGN_OR_RETURN(const ValuePtr value, ElementAt(whole, request, absl::StrCat(request.handle())));
  // A value may be in a tuple many times.
  const int64_t bytes = value->bytes();
  const int64_t most = std::min(runner_.store()->max_bytes(), options_.max_message_bytes);
  if (bytes > most) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "handle ", request.handle(), " would give ", bytes,
        " bytes; budgets.batch_bytes and max_message_bytes allow ", most, ". Read its elements"));
  }
  // The answer, and the message that is made of it; arrays are larger than the batch.
  RETURN_IF_ERROR(context->MakeRoom((request.csr() ? 4 : 2) * bytes, "the answer").status());
  v1::ReadHandleResponse response;
  if (request.csr()) {
    if (!value->prepared.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("csr: handle ", request.handle(), " is no batch that was prepared"));
    }
    AddCsr(value->prepared->model->plan, *value->prepared->batch, &response);
  }
  AddValue(*value, &response);
  return response;
}

}  // namespace emberd::coordinator
