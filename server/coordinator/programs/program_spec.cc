#include "server/coordinator/programs/program_spec.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "preprocess/batch/chip_cost.h"
#include "server/step/request_reader.h"

namespace emberd::coordinator {
namespace {

using v1::ProgramInput;
using v1::ProgramSpec;

constexpr int kMaxIdsPerSample = 65536;
constexpr int64_t kMaxSamples = (int64_t{1} << 31) - 1;

absl::Status BadSpec(absl::string_view field, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("spec.", field, " ", what));
}

absl::Status CheckSpecRange(const std::string& field, int64_t value, int64_t least, int64_t most) {
  if (least <= value && value <= most) return absl::OkStatus();
  return BadSpec(field, absl::StrCat("is ", value, "; allowed: [", least, ", ", most, "]"));
}

// Of what only one kind has.
absl::Status CheckAbsent(const ProgramSpec& spec, bool absent, absl::string_view field) {
  if (absent) return absl::OkStatus();
  return BadSpec(
      field, absl::StrCat("is not for programs of the kind ", ProgramSpec::Kind_Name(spec.kind())));
}

absl::Status CompleteFeatures(const step::ServedModel& model, ProgramSpec* spec) {
  if (spec->inputs().empty()) {
    for (const auto& feature : model.config.features())
      spec->add_inputs()->set_feature(feature.name());
  }
  absl::flat_hash_set<std::string> seen;
  for (int i = 0; i < spec->inputs_size(); ++i) {
    ProgramInput& input = *spec->mutable_inputs(i);
    const std::string at = absl::StrCat("inputs[", i, "].");
    ASSIGN_OR_RETURN(const int index, step::FindFeature(model, input.feature(), "spec.inputs", i));
    if (!seen.insert(input.feature()).second) {
      return BadSpec(at + "feature", absl::StrCat("'", input.feature(), "' is repeated"));
    }
    RETURN_IF_ERROR(CheckSpecRange(at + "max_samples", input.max_samples(), 0, kMaxSamples));
    RETURN_IF_ERROR(CheckSpecRange(at + "max_ids", input.max_ids(), 0, kMaxSamples));
    RETURN_IF_ERROR(CheckSpecRange(at + "form", input.form(), 0, ProgramInput::Form_MAX));
    RETURN_IF_ERROR(CheckAbsent(*spec, input.tensors().empty(), at + "tensors"));
    if (input.max_samples() == 0) {
      input.set_max_samples(model.config.features(index).batch_size());
    }
  }
  return absl::OkStatus();
}

absl::Status CompleteLimits(const step::ServedModel& model, ProgramSpec* spec) {
  absl::flat_hash_map<std::string, v1::ProgramLimits> given;
  for (int i = 0; i < spec->limits_size(); ++i) {
    const v1::ProgramLimits& limits = spec->limits(i);
    const std::string at = absl::StrCat("limits[", i, "].");
    RETURN_IF_ERROR(CheckSpecRange(at + "max_ids_per_partition", limits.max_ids_per_partition(), 0,
                                   kMaxSamples));
    RETURN_IF_ERROR(CheckSpecRange(at + "max_unique_ids_per_partition",
                                   limits.max_unique_ids_per_partition(), 0, kMaxSamples));
    if (!given.emplace(limits.stack(), limits).second) {
      return BadSpec(at + "stack", absl::StrCat("'", limits.stack(), "' is repeated"));
    }
  }
  spec->clear_limits();
  std::vector<std::string> names;
  for (const preprocess::StackPlan& stack : model.PlanNow().stacks) {
    names.push_back(stack.name);
    v1::ProgramLimits* limits = spec->add_limits();
    const auto found = given.find(stack.name);
    if (found != given.end()) {
      *limits = found->second;
      given.erase(found);
      continue;
    }
    limits->set_stack(stack.name);
    limits->set_max_ids_per_partition(static_cast<int32_t>(stack.limits.ids));
    limits->set_max_unique_ids_per_partition(static_cast<int32_t>(stack.limits.unique));
  }
  if (given.empty()) return absl::OkStatus();
  const std::string& unknown = given.begin()->first;
  return BadSpec("limits",
                 absl::StrCat("name the stack '", unknown, "', which model '", model.config.name(),
                              "' does not have; ", KnownNames("stacks", unknown, names)));
}

absl::Status CompleteLookup(const step::ServedModel& model, ProgramSpec* spec) {
  RETURN_IF_ERROR(CompleteFeatures(model, spec));
  RETURN_IF_ERROR(CompleteLimits(model, spec));
  RETURN_IF_ERROR(CheckSpecRange("max_ids_per_chip_per_sample", spec->max_ids_per_chip_per_sample(),
                                 0, kMaxIdsPerSample));
  RETURN_IF_ERROR(CheckSpecRange("max_minibatches_per_sparsecore",
                                 spec->max_minibatches_per_sparsecore(), 0,
                                 preprocess::kDefaultMinibatches));
  if (spec->max_ids_per_chip_per_sample() == 0) {
    spec->set_max_ids_per_chip_per_sample(preprocess::kDefaultIdsPerSample);
  }
  if (spec->max_minibatches_per_sparsecore() == 0) {
    spec->set_max_minibatches_per_sparsecore(preprocess::kDefaultMinibatches);
  }
  if (!spec->has_allow_id_dropping()) {
    spec->set_allow_id_dropping(model.config.plan().allow_id_dropping());
  }
  if (spec->activation_dtype() == v1::DATA_TYPE_UNSPECIFIED) {
    spec->set_activation_dtype(v1::FLOAT32);
  }
  if (spec->activation_dtype() != v1::FLOAT32 && spec->activation_dtype() != v1::BFLOAT16) {
    return BadSpec("activation_dtype", absl::StrCat("is ", step::TypeText(spec->activation_dtype()),
                                                    "; it must be FLOAT32 or BFLOAT16"));
  }
  return absl::OkStatus();
}

// What only a LOOKUP has.
absl::Status CheckNoLookup(const ProgramSpec& spec) {
  RETURN_IF_ERROR(CheckAbsent(spec, spec.limits().empty(), "limits"));
  RETURN_IF_ERROR(
      CheckAbsent(spec, spec.max_ids_per_chip_per_sample() == 0, "max_ids_per_chip_per_sample"));
  RETURN_IF_ERROR(CheckAbsent(spec, spec.max_minibatches_per_sparsecore() == 0,
                              "max_minibatches_per_sparsecore"));
  RETURN_IF_ERROR(CheckAbsent(spec, !spec.has_allow_id_dropping(), "allow_id_dropping"));
  RETURN_IF_ERROR(CheckAbsent(spec, spec.activation_dtype() == 0, "activation_dtype"));
  return CheckAbsent(spec, !spec.inference(), "inference");
}

absl::Status CheckOperand(const ProgramSpec& spec, const v1::Operand& operand,
                          const std::string& at) {
  RETURN_IF_ERROR(CheckSpecRange(at + ".argument", operand.argument(), 0, spec.inputs_size() - 1));
  const int tensors = spec.inputs(operand.argument()).tensors_size();
  return CheckSpecRange(at + ".output_index", operand.output_index(), 0,
                        tensors > 0 ? tensors : kMaxIdsPerSample);
}

absl::Status CompleteOutputs(ProgramSpec* spec) {
  if (spec->outputs().empty()) return BadSpec("outputs", "is empty; there must be at least one");
  for (int i = 0; i < spec->outputs_size(); ++i) {
    v1::ElementwiseOutput& output = *spec->mutable_outputs(i);
    const std::string at = absl::StrCat("outputs[", i, "]");
    RETURN_IF_ERROR(CheckSpecRange(at + ".operation", output.operation(), 1,
                                   v1::ElementwiseOutput::Operation_MAX));
    if (output.scale() == 0) output.set_scale(1);
    if (!(output.scale() - output.scale() == 0)) {
      return BadSpec(at + ".scale", absl::StrCat("is ", output.scale(), "; it must be finite"));
    }
    RETURN_IF_ERROR(CheckOperand(*spec, output.a(), at + ".a"));
    if (output.operation() != v1::ElementwiseOutput::COPY) {
      RETURN_IF_ERROR(CheckOperand(*spec, output.b(), at + ".b"));
    }
    if (output.has_size()) RETURN_IF_ERROR(CheckOperand(*spec, output.size(), at + ".size"));
  }
  return absl::OkStatus();
}

// `last`: of outputs and tensors.
absl::Status CheckAliases(const ProgramSpec& spec, int last, int last_argument) {
  for (int i = 0; i < spec.aliases_size(); ++i) {
    const v1::ProgramAlias& alias = spec.aliases(i);
    const std::string at = absl::StrCat("aliases[", i, "].");
    RETURN_IF_ERROR(CheckSpecRange(at + "output", alias.output(), 0, last));
    RETURN_IF_ERROR(CheckSpecRange(at + "tensor", alias.tensor(), 0, last));
    RETURN_IF_ERROR(CheckSpecRange(at + "argument", alias.argument(), 0, last_argument));
    if (spec.kind() == ProgramSpec::ELEMENTWISE && spec.inputs(alias.argument()).dynamic()) {
      return BadSpec(at + "argument", absl::StrCat("is ", alias.argument(),
                                                   ", which is dynamic; it cannot be donated"));
    }
  }
  return absl::OkStatus();
}

absl::Status CompleteElementwise(ProgramSpec* spec) {
  RETURN_IF_ERROR(CheckNoLookup(*spec));
  if (!spec->model().empty()) return CheckAbsent(*spec, false, "model");
  for (int i = 0; i < spec->inputs_size(); ++i) {
    const ProgramInput& input = spec->inputs(i);
    const std::string at = absl::StrCat("inputs[", i, "].");
    RETURN_IF_ERROR(CheckAbsent(*spec, input.form() == ProgramInput::ANY, at + "form"));
    RETURN_IF_ERROR(CheckAbsent(*spec, !input.weighted(), at + "weighted"));
    RETURN_IF_ERROR(CheckAbsent(*spec, input.max_samples() == 0, at + "max_samples"));
    RETURN_IF_ERROR(CheckAbsent(*spec, input.max_ids() == 0, at + "max_ids"));
  }
  RETURN_IF_ERROR(CompleteOutputs(spec));
  return CheckAliases(*spec, kMaxIdsPerSample, spec->inputs_size() - 1);
}

absl::Status Mismatch(int index, const std::string& name, const std::string& expected,
                      const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat("Run-time shape mismatch for argument[", index,
                                                 "] (", name, "). Expected ", expected, "; got ",
                                                 got));
}

struct BatchShape {
  ProgramInput::Form form = ProgramInput::ANY;
  bool weighted = false;
  int64_t samples = 0;
  int64_t ids = 0;
};

int64_t Extent(const v1::Tensor& tensor, int dimension) {
  return dimension < tensor.shape_size() ? tensor.shape(dimension) : 0;
}

// Of a gradient: all dimensions but the last count samples. A wrong shape may have any number.
int64_t SamplesOf(const v1::Tensor& gradient) {
  int64_t samples = 1;
  for (int d = 0; d < std::max(gradient.shape_size() - 1, 1); ++d) {
    const int64_t extent = Extent(gradient, d);
    if (extent <= 0) return 0;
    samples = extent > kMaxSamples / samples ? kMaxSamples : samples * extent;
  }
  return samples;
}

// Of what DecodeLookup will check.
BatchShape ShapeOfIds(const v1::FeatureIds& ids, const v1::FeatureConfig& config) {
  BatchShape shape;
  if (ids.has_dense()) {
    const auto read = config::SamplesOf(ids.dense().ids().shape(), config.output_shape());
    if (!read.ok()) return shape;
    shape.form = ProgramInput::DENSE;
    shape.weighted = ids.dense().has_weights();
    shape.samples = read->samples;
    if (__builtin_mul_overflow(read->samples, read->ids_per_sample, &shape.ids)) {
      shape.ids = kMaxSamples;
    }
  } else if (ids.has_sparse()) {
    shape.form = ProgramInput::SPARSE;
    shape.weighted = ids.sparse().has_weights();
    shape.samples = ids.sparse().sample_count();
    shape.ids = Extent(ids.sparse().values(), 0);
  } else if (ids.has_ragged()) {
    shape.form = ProgramInput::RAGGED;
    shape.weighted = ids.ragged().has_weights();
    shape.samples = Extent(ids.ragged().row_splits(), 0) - 1;
    shape.ids = Extent(ids.ragged().values(), 0);
  }
  return shape;
}

std::string ShapeOfInputText(const ProgramInput& input) {
  return absl::StrCat(
      input.form() == ProgramInput::ANY ? "" : ProgramInput::Form_Name(input.form()) + " ", "[",
      input.dynamic() ? "<=" : "", input.max_samples(), " samples",
      input.max_ids() > 0 ? absl::StrCat(", <=", input.max_ids(), " ids") : "", "]",
      input.form() == ProgramInput::ANY ? ""
      : input.weighted()                ? " weighted"
                                        : " unweighted");
}

absl::Status CheckFeature(const ProgramInput& input, int index, const v1::FeatureIds& ids,
                          const v1::FeatureConfig& config) {
  const BatchShape shape = ShapeOfIds(ids, config);
  if (shape.form == ProgramInput::ANY) return absl::OkStatus();  // refused when it is decoded
  const bool form_fits = input.form() == ProgramInput::ANY ||
                         (input.form() == shape.form && input.weighted() == shape.weighted);
  const bool samples_fit =
      input.dynamic() ? shape.samples <= input.max_samples() : shape.samples == input.max_samples();
  const bool ids_fit = input.max_ids() == 0 || shape.ids <= input.max_ids();
  if (form_fits && samples_fit && ids_fit) return absl::OkStatus();
  return Mismatch(
      index, input.feature(), ShapeOfInputText(input),
      absl::StrCat(ProgramInput::Form_Name(shape.form), " [", shape.samples, " samples, ",
                   shape.ids, " ids]", shape.weighted ? " weighted" : " unweighted"));
}

}  // namespace

std::string TensorText(const v1::Tensor& tensor) {
  return absl::StrCat(step::TypeText(tensor.dtype()), step::ShapeText(tensor.shape()));
}

absl::StatusOr<ProgramSpec> CompleteSpec(ProgramSpec spec, const step::ServedModel* model) {
  if (spec.kind() == ProgramSpec::ELEMENTWISE) {
    RETURN_IF_ERROR(CompleteElementwise(&spec));
    return spec;
  }
  RETURN_IF_ERROR(CheckSpecRange("kind", spec.kind(), 1, ProgramSpec::Kind_MAX));
  RETURN_IF_ERROR(CheckAbsent(spec, spec.outputs().empty(), "outputs"));
  if (spec.kind() == ProgramSpec::LOOKUP) {
    RETURN_IF_ERROR(CheckAbsent(spec, spec.aliases().empty(), "aliases"));
    RETURN_IF_ERROR(step::CheckInference(*model, spec.inference()));
    RETURN_IF_ERROR(CompleteLookup(*model, &spec));
    return spec;
  }
  RETURN_IF_ERROR(step::CheckTrainable(*model));
  RETURN_IF_ERROR(CheckNoLookup(spec));
  RETURN_IF_ERROR(CheckAliases(spec, 0, 0));
  RETURN_IF_ERROR(CompleteFeatures(*model, &spec));
  return spec;
}

std::string ProgramKey(const ProgramSpec& spec, const step::ServedModel* model) {
  std::string text = spec.SerializeAsString();
  if (model != nullptr) absl::StrAppend(&text, "|", model->id, "|", model->plan.fingerprint);
  return Sha256Hex(text);
}

absl::Status SizeBuffers(const step::ServedModel& model, v1::CompileResponse* info) {
  const ProgramSpec& spec = info->spec();
  std::vector<int64_t> samples(model.config.features_size()), ids(model.config.features_size());
  for (const ProgramInput& input : spec.inputs()) {
    const int feature = model.features.at(input.feature());
    samples[feature] = input.max_samples();
    ids[feature] = input.max_ids();
  }
  for (size_t k = 0; k < model.plan.stacks.size(); ++k) {
    const preprocess::StackPlan& stack = model.plan.stacks[k];
    const preprocess::ProgramBuffers buffers = preprocess::SizeProgramBuffers(
        model.plan, stack, model.config.plan().sample_layout(), samples,
        spec.max_ids_per_chip_per_sample(), spec.max_minibatches_per_sparsecore());
    int64_t max_ids = 0;
    for (const preprocess::FeaturePlan& feature : stack.features) max_ids += ids[feature.feature];
    const v1::TableConfig& table = model.config.tables(stack.tables.front().table);
    v1::StackProgram& program = *info->add_stacks();
    program.set_stack(stack.name);
    program.set_samples(buffers.samples);
    program.set_id_capacity(buffers.id_capacity);
    program.set_row_pointers(buffers.row_pointers);
    program.set_activation_rows_per_sparsecore(buffers.activation_rows);
    program.set_embedding_dim(stack.embedding_dim);
    program.set_bytes_per_sparsecore(buffers.bytes_per_sparsecore);
    info->set_bytes_per_sparsecore(info->bytes_per_sparsecore() + buffers.bytes_per_sparsecore);
    *program.mutable_limits() = spec.limits(static_cast<int>(k));
    program.set_kernel(absl::StrCat("gather ", v1::DataType_Name(table.storage_dtype()), " x ",
                                    stack.embedding_dim, ", ",
                                    v1::Combiner_Name(table.combiner())));
    if (max_ids <= program.id_capacity() || spec.allow_id_dropping()) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "stack '", stack.name, "': max_ids of its features are ", max_ids,
        " ids together; the capacity of its buffer of ids is ", program.id_capacity(),
        " = max_ids_per_chip_per_sample ", spec.max_ids_per_chip_per_sample(), " x ",
        buffers.samples,
        " samples. Raise max_ids_per_chip_per_sample, lower max_ids, or set allow_id_dropping"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::LookupRequest> BatchRequest(const ProgramSpec& spec,
                                               const step::ServedModel& model, v1::Literal batch) {
  if (batch.tensors_size() + batch.elements_size() > 0) {
    return absl::InvalidArgumentError("a batch of a LOOKUP has features, no tensors or elements");
  }
  absl::flat_hash_map<std::string, int> inputs;
  for (int i = 0; i < spec.inputs_size(); ++i) inputs[spec.inputs(i).feature()] = i;
  std::vector<v1::FeatureIds*> given(spec.inputs_size());
  for (v1::FeatureIds& ids : *batch.mutable_features()) {
    const auto found = inputs.find(ids.feature());
    if (found == inputs.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("features: '", ids.feature(), "' is not an input of the program"));
    }
    if (given[found->second] != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("features: '", ids.feature(), "' is repeated"));
    }
    given[found->second] = &ids;
    RETURN_IF_ERROR(CheckFeature(spec.inputs(found->second), found->second, ids,
                                 model.config.features(model.features.at(ids.feature()))));
  }
  v1::LookupRequest request;
  request.set_model_id(model.id);
  request.set_activation_dtype(spec.activation_dtype());
  request.set_inference(spec.inference());
  for (int i = 0; i < spec.inputs_size(); ++i) {
    if (given[i] == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("features: '", spec.inputs(i).feature(),
                       "' is missing; every input of the program must be given once"));
    }
    *request.add_features() = std::move(*given[i]);
  }
  for (const v1::FeatureConfig& feature : model.config.features()) {
    if (inputs.contains(feature.name())) continue;
    v1::FeatureIds* ids = request.add_features();
    ids->set_feature(feature.name());
    v1::Tensor* const none = ids->mutable_dense()->mutable_ids();  // no samples
    none->set_dtype(v1::INT32);
    none->add_shape(0);
  }
  return request;
}

absl::Status CheckGradients(const ProgramSpec& spec, const Tensors& gradients) {
  for (const auto& gradient : gradients) {
    const ProgramInput* input = nullptr;
    for (const ProgramInput& candidate : spec.inputs()) {
      if (candidate.feature() == gradient->name()) input = &candidate;
    }
    if (input == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "argument[1]: '", gradient->name(), "' is not an input of the program; its inputs are ",
          absl::StrJoin(spec.inputs(), ", ", [](std::string* out, const ProgramInput& one) {
            absl::StrAppend(out, "'", one.feature(), "'");
          })));
    }
    const int64_t samples = SamplesOf(gradient->tensor());
    if (input->dynamic() ? samples <= input->max_samples() : samples == input->max_samples()) {
      continue;
    }
    return Mismatch(1, input->feature(), ShapeOfInputText(*input), TensorText(gradient->tensor()));
  }
  return absl::OkStatus();
}

absl::Status CheckArgument(const ProgramSpec& spec, int index, const Tensors& tensors) {
  const ProgramInput& input = spec.inputs(index);
  if (input.tensors().empty()) return absl::OkStatus();
  bool fits = static_cast<int>(tensors.size()) == input.tensors_size();
  for (int k = 0; fits && k < input.tensors_size(); ++k) {
    const v1::TensorBound& bound = input.tensors(k);
    const v1::Tensor& tensor = tensors[k]->tensor();
    fits = bound.dtype() == tensor.dtype() && bound.shape_size() == tensor.shape_size();
    for (int d = 0; fits && d < bound.shape_size(); ++d) {
      fits =
          input.dynamic() ? tensor.shape(d) <= bound.shape(d) : tensor.shape(d) == bound.shape(d);
    }
  }
  if (fits) return absl::OkStatus();
  const std::string expected =
      absl::StrJoin(input.tensors(), ", ", [&](std::string* out, const v1::TensorBound& bound) {
        absl::StrAppend(out, step::TypeText(bound.dtype()), input.dynamic() ? "<=" : "",
                        step::ShapeText(bound.shape()));
      });
  const std::string got = absl::StrJoin(tensors, ", ", [](std::string* out, const auto& tensor) {
    absl::StrAppend(out, TensorText(tensor->tensor()));
  });
  return Mismatch(index, input.feature(), absl::StrCat("(", expected, ")"),
                  absl::StrCat("(", got, ")"));
}

}  // namespace emberd::coordinator
