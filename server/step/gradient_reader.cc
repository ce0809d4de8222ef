#include "server/step/gradient_reader.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/finite.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/optimizers.h"
#include "server/step/request_reader.h"
#include "server/step/shared_tensors.h"

namespace emberd::step {
namespace {

float ElementAt(const char* data, v1::DataType dtype, int64_t i) {
  if (dtype == v1::FLOAT32) {
    float value;
    std::memcpy(&value, data + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t value;
  std::memcpy(&value, data + i * sizeof(value), sizeof(value));
  return FromBfloat16(value);
}

// `count` elements, rows of `dim`.
absl::Status CheckFinite(const FeatureGradientView& view, int64_t count, int64_t dim,
                         const std::string& path) {
  const int64_t bad = view.dtype == v1::FLOAT32 ? FindNonFiniteFloat32(view.data, count)
                                                : FindNonFiniteBfloat16(view.data, count);
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, " is ", ElementAt(view.data, view.dtype, bad), " at sample ", bad / dim,
                   ", column ", bad % dim, "; gradients must be finite"));
}

// Where the elements lie in shared memory.
absl::StatusOr<const char*> FindShared(const v1::FeatureGradient& gradient, const std::string& path,
                                       const RegionServer* regions, GradientInput* input) {
  ASSIGN_OR_RETURN(const int64_t bytes, ShapeBytes(gradient.gradient(), path));
  const size_t sent = gradient.gradient().data().size();
  if (gradient.shared().size() != static_cast<uint64_t>(bytes) || sent > 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": shared.size is ",
                                                   gradient.shared().size(), " and data has ", sent,
                                                   " bytes; they must be ", bytes, " and 0"));
  }
  const v1::SharedBlock& block = gradient.shared();
  RETURN_IF_ERROR(FindBlock(regions, block, path + ": shared").status());
  const uint64_t name = block.region();
  auto region = std::find_if(input->regions.begin(), input->regions.end(),
                             [&](const NamedRegion& known) { return known.name == name; });
  if (region == input->regions.end()) {
    region = input->regions.insert(region, NamedRegion{name, regions->Region(name)});
  }
  // It may have been given back just now. What the input has keeps it mapped.
  if (region->memory == nullptr || !region->memory->Holds(block.offset(), block.size())) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": shared: the client has given the region back"));
  }
  return region->memory->data() + block.offset();
}

absl::Status ReadFeature(const v1::FeatureGradient& gradient, int feature, const KeptBatch& batch,
                         const RegionServer* regions, GradientInput* input) {
  // The view has its data last: until then there is no gradient.
  FeatureGradientView* const view = &input->features[feature];
  const std::string path = absl::StrCat("gradient of feature '", gradient.feature(), "'");
  const v1::Tensor& tensor = gradient.gradient();
  if (tensor.dtype() != v1::FLOAT32 && tensor.dtype() != v1::BFLOAT16) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": dtype is ",
                                                   v1::DataType_Name(tensor.dtype()),
                                                   "; it must be FLOAT32 or BFLOAT16"));
  }
  const int64_t dim = batch.model->TableOfFeature(feature).embedding_dim();
  const int64_t samples = batch.feature_samples[feature];
  if (absl::MakeConstSpan(tensor.shape()) != batch.model->ActivationShape(feature, samples)) {
    RETURN_IF_ERROR(CheckShape(tensor, {samples, dim}, path));
  }
  view->dtype = tensor.dtype();
  view->shared = gradient.has_shared();
  if (gradient.has_shared()) {
    ASSIGN_OR_RETURN(view->data, FindShared(gradient, path, regions, input));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckedSize(tensor, path).status());
  view->data = tensor.data().data();
  return absl::OkStatus();
}

// What a step sets of the optimizer of one stack.
struct StackOverrides {
  v1::OptimizerConfig optimizer;  // with the values
  absl::flat_hash_map<std::string, double> values;
  std::map<std::string, std::set<std::string>> tables;  // each value is for; "": for all
};

// Sets the values of request.hyperparameters[index], which is for this stack.
absl::Status AddOverrides(const v1::StepHyperparameters& step, int index,
                          const std::string& stack_name, StackOverrides* overrides) {
  // In the order of the names: which fault is named must not depend on the order of a hash map.
  const std::map<std::string, double> sorted(step.values().begin(), step.values().end());
  for (const auto& [name, value] : sorted) {
    const auto held = config::SetHyperparameter(&overrides->optimizer, name, value);
    if (!held.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("hyperparameters[", index, "].values: ", held.status().message()));
    }
    overrides->tables[name].insert(step.table());
    const auto [known, is_new] = overrides->values.try_emplace(name, *held);
    if (!is_new && known->second != *held) {
      return absl::InvalidArgumentError(
          absl::StrCat("hyperparameters[", index, "].values['", name, "'] is ",
                       config::NumberText(*held), " for table '", step.table(), "', but ",
                       config::NumberText(known->second), " for another table of stack '",
                       stack_name, "'; tables of one stack share their optimizer"));
    }
  }
  return absl::OkStatus();
}

// A value for one table holds for its stack: where others of it are not named, it would change
// what nobody has asked for.
absl::Status CheckAllAreNamed(const StackOverrides& overrides, const ServedModel& model,
                              int stack) {
  for (const auto& [name, tables] : overrides.tables) {
    if (tables.contains("")) continue;
    for (int t = 0; t < model.config.tables_size(); ++t) {  // also views of one resource
      const std::string& table = model.config.tables(t).name();
      if (model.plan.table_at[t].stack != stack || tables.contains(table)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "hyperparameters: '", name, "' is given for table '", *tables.begin(),
          "', but not for table '", table, "' of the same stack '", model.plan.stacks[stack].name,
          "'; tables of one stack share their optimizer: give all of them the same value, or "
          "declare the model with tables that are not stacked"));
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeHyperparameters(const v1::ApplyGradientsRequest& request,
                                   const ServedModel& model, GradientInput* input) {
  const auto& stacks = model.plan.stacks;
  input->hyperparameters.resize(stacks.size());
  if (request.hyperparameters_size() == 0) return absl::OkStatus();
  std::vector<StackOverrides> overrides(stacks.size());
  for (size_t k = 0; k < stacks.size(); ++k) {
    // Tables of a stack share their optimizer.
    overrides[k].optimizer = model.config.tables(stacks[k].tables.front().table).optimizer();
  }
  for (int i = 0; i < request.hyperparameters_size(); ++i) {
    const v1::StepHyperparameters& step = request.hyperparameters(i);
    if (!step.table().empty() && !model.tables.contains(step.table())) {
      return absl::InvalidArgumentError(
          absl::StrCat("hyperparameters[", i, "].table is '", step.table(), "', which model '",
                       model.config.name(), "' does not have; ",
                       KnownNames("tables", step.table(), config::TableNames(model.config))));
    }
    for (size_t k = 0; k < stacks.size(); ++k) {
      if (!step.table().empty() &&
          model.plan.table_at[model.tables.at(step.table())].stack != static_cast<int>(k)) {
        continue;
      }
      RETURN_IF_ERROR(AddOverrides(step, i, stacks[k].name, &overrides[k]));
    }
  }
  // Whether values go together shows when a stack has all of its own, as the shards will see them.
  for (size_t k = 0; k < stacks.size(); ++k) {
    if (overrides[k].values.empty()) continue;
    RETURN_IF_ERROR(CheckAllAreNamed(overrides[k], model, static_cast<int>(k)));
    const absl::Status together = config::CheckOptimizer(overrides[k].optimizer, "");
    if (!together.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("hyperparameters of stack '", stacks[k].name, "': ", together.message()));
    }
    input->hyperparameters[k] = std::move(overrides[k].values);
  }
  return absl::OkStatus();
}

absl::Status DecodeStep(const v1::ApplyGradientsRequest& request, const ServedModel& model,
                        GradientInput* input) {
  input->rng_seed = request.rng_seed();
  if (request.has_step()) {
    if (request.step() < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("step is ", request.step(), "; it must be >= 0"));
    }
    input->step = request.step();
    return absl::OkStatus();
  }
  for (const v1::TableConfig& table : model.config.tables()) {
    if (config::OptimizerNeedsStep(table.optimizer())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "step is not given; the optimizer ", config::OptimizerName(table.optimizer()),
          " of table '", table.name(), "' needs the number of the step"));
    }
  }
  return absl::OkStatus();
}

// Fills `features` with those that have been read.
absl::Status ReadFeatures(const v1::ApplyGradientsRequest& request, const KeptBatch& batch,
                          const RegionServer* regions, GradientInput* input,
                          std::vector<int>* features) {
  for (int i = 0; i < request.gradients_size(); ++i) {
    const v1::FeatureGradient& gradient = request.gradients(i);
    ASSIGN_OR_RETURN(const int feature,
                     FindFeature(*batch.model, gradient.feature(), "gradients", i));
    if (input->features[feature].given()) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradients[", i, "].feature '", gradient.feature(), "' is repeated"));
    }
    RETURN_IF_ERROR(ReadFeature(gradient, feature, batch, regions, input));
    features->push_back(feature);
  }
  return absl::OkStatus();
}

// All at once; names the first that has a bad value.
absl::Status CheckValues(const GradientInput& input, const KeptBatch& batch,
                         absl::Span<const int> features, CpuPool* cpu) {
  std::vector<absl::Status> checks(features.size());
  ParallelFor(cpu, static_cast<int64_t>(features.size()), [&](int64_t i) {
    const v1::TableConfig& table = batch.model->TableOfFeature(features[i]);
    if (table.on_nonfinite_gradient() == v1::SKIP_ROW) return;
    const std::string& name = batch.model->config.features(features[i]).name();
    const int64_t dim = table.embedding_dim();
    checks[i] = CheckFinite(input.features[features[i]], batch.feature_samples[features[i]] * dim,
                            dim, absl::StrCat("gradient of feature '", name, "'"));
  });
  for (const absl::Status& check : checks) RETURN_IF_ERROR(check);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GradientInput> ReadGradients(const v1::ApplyGradientsRequest& request,
                                            const KeptBatch& batch, const RegionServer* regions,
                                            CpuPool* cpu) {
  GradientInput input;
  input.features.resize(batch.model->config.features_size());
  std::vector<int> features;
  const absl::Status status = ReadFeatures(request, batch, regions, &input, &features);
  // What stands before the one that cannot be read may have a bad value, which then came first.
  RETURN_IF_ERROR(CheckValues(input, batch, features, cpu));
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(DecodeHyperparameters(request, *batch.model, &input));
  RETURN_IF_ERROR(DecodeStep(request, *batch.model, &input));
  return input;
}

}  // namespace emberd::step
