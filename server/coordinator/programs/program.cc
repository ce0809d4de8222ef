#include "server/coordinator/programs/program.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator/programs/program_spec.h"

namespace emberd::server {

absl::StatusOr<std::shared_ptr<const Program>> Program::Compile(
    v1::ProgramSpec spec, const std::string& key, const std::shared_ptr<const ServedModel>& model,
    CpuPool* cpu) {
  std::shared_ptr<Program> program(new Program());
  program->cpu_ = cpu;
  v1::CompileResponse& info = program->info_;
  info.set_fingerprint(key);
  *info.mutable_spec() = std::move(spec);
  if (model == nullptr) return program;
  info.set_model_id(model->id);
  program->plan_fingerprint_ = model->plan.fingerprint;
  if (program->kind() != v1::ProgramSpec::LOOKUP) return program;
  ASSIGN_OR_RETURN(const std::vector<v1::StackProgram> stacks, SizeBuffers(info.spec(), *model));
  for (const v1::StackProgram& stack : stacks) {
    *info.add_stacks() = stack;
    info.set_bytes_per_sparsecore(info.bytes_per_sparsecore() + stack.bytes_per_sparsecore());
  }
  RETURN_IF_ERROR(program->ModelFor(model).status());
  return program;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> Program::ModelFor(
    const std::shared_ptr<const ServedModel>& now) const {
  if (now->id != info_.model_id() || now->plan.fingerprint != plan_fingerprint_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the plan of model '", now->config.name(),
                     "' has changed since the program was compiled; compile it again"));
  }
  if (kind() != v1::ProgramSpec::LOOKUP) return now;
  absl::MutexLock lock(&mutex_);
  // The rows of a model that was reset are others; its plan is the same.
  if (model_ == nullptr || model_->history != now->history) model_ = WithLimits(*now);
  return model_;
}

std::shared_ptr<const ServedModel> Program::WithLimits(const ServedModel& model) const {
  auto limited = std::make_shared<ServedModel>();
  limited->id = model.id;
  limited->history = model.history;
  limited->config = model.config;
  limited->config.mutable_plan()->set_allow_id_dropping(spec().allow_id_dropping());
  limited->plan = model.plan;
  preprocess::BufferLimits buffers;
  for (size_t k = 0; k < limited->plan.stacks.size(); ++k) {
    const v1::StackProgram& stack = info_.stacks(static_cast<int>(k));
    limited->plan.stacks[k].max_ids_per_partition = stack.limits().max_ids_per_partition();
    limited->plan.stacks[k].max_unique_ids_per_partition =
        stack.limits().max_unique_ids_per_partition();
    buffers.id_capacity.push_back(stack.id_capacity());
  }
  buffers.max_minibatches = spec().max_minibatches_per_sparsecore();
  buffers.ids_per_sample = spec().max_ids_per_chip_per_sample();
  buffers.drop = spec().allow_id_dropping();
  limited->shard_stacks = model.shard_stacks;
  // Creating one cannot fail for a plan that is served.
  limited->preprocessor =
      preprocess::Preprocessor::Create(&limited->config, &limited->plan, cpu_).value();
  limited->preprocessor->SetBufferLimits(std::move(buffers));
  limited->features = model.features;
  limited->tables = model.tables;
  limited->metrics = model.metrics;
  limited->observed = model.observed;
  limited->missing_gradients = model.missing_gradients;
  return limited;
}

}  // namespace emberd::server
