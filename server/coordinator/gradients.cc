#include "server/coordinator/gradients.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
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
#include "server/coordinator/request_reader.h"
#include "server/coordinator/shared_tensors.h"

namespace emberd::server {
namespace {

float ElementAt(const FeatureGradientView& view, int64_t i) {
  if (view.dtype == v1::FLOAT32) {
    float value;
    std::memcpy(&value, view.data + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t value;
  std::memcpy(&value, view.data + i * sizeof(value), sizeof(value));
  return FromBfloat16(value);
}

absl::Status CheckFinite(const FeatureGradientView& view, int64_t samples, int64_t dim,
                         const std::string& path) {
  const int64_t bad = view.dtype == v1::FLOAT32 ? FindNonFiniteFloat32(view.data, samples * dim)
                                                : FindNonFiniteBfloat16(view.data, samples * dim);
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, " is ", ElementAt(view, bad), " at sample ",
                                                 bad / dim, ", column ", bad % dim,
                                                 "; gradients must be finite"));
}

// Where the elements lie, which fill the tensor's shape.
absl::StatusOr<const char*> FindElements(const v1::FeatureGradient& gradient,
                                         const std::string& path, const RegionServer* regions,
                                         GradientInput* input) {
  const v1::Tensor& tensor = gradient.gradient();
  if (!gradient.has_shared()) {
    RETURN_IF_ERROR(CheckedSize(tensor, path).status());
    return tensor.data().data();
  }
  ASSIGN_OR_RETURN(const int64_t bytes, ShapeBytes(tensor, path));
  if (gradient.shared().size() != static_cast<uint64_t>(bytes) || !tensor.data().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": shared.size is ", gradient.shared().size(), " and data has ",
                     tensor.data().size(), " bytes; they must be ", bytes, " and 0"));
  }
  ASSIGN_OR_RETURN(const auto memory, FindBlock(regions, gradient.shared(), path + ": shared"));
  const uint64_t name = gradient.shared().region();
  const bool known = std::any_of(input->regions.begin(), input->regions.end(),
                                 [&](const NamedRegion& region) { return region.name == name; });
  if (known) return memory.get();
  NamedRegion region = {name, regions->Region(name)};
  if (region.memory == nullptr) {  // given back just now
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": shared: the client has given the region back"));
  }
  input->regions.push_back(std::move(region));
  return memory.get();
}

absl::Status DecodeFeature(const v1::FeatureGradient& gradient, int feature, const KeptBatch& batch,
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
  const int64_t samples = batch.feature_samples[feature];
  const int64_t dim = batch.model->TableOfFeature(feature).embedding_dim();
  if (absl::MakeConstSpan(tensor.shape()) != batch.model->ActivationShape(feature, samples)) {
    RETURN_IF_ERROR(CheckShape(tensor, {samples, dim}, path));
  }
  ASSIGN_OR_RETURN(view->data, FindElements(gradient, path, regions, input));
  view->dtype = tensor.dtype();
  view->shared = gradient.has_shared();
  return absl::OkStatus();
}

// What a step sets of the optimizer of one stack.
struct StackOverrides {
  v1::OptimizerConfig optimizer;  // with the values
  absl::flat_hash_map<std::string, double> values;
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

bool IsFor(const v1::StepHyperparameters& step, const preprocess::StackPlan& stack) {
  return step.table().empty() ||
         std::any_of(stack.tables.begin(), stack.tables.end(),
                     [&](const auto& table) { return table.name == step.table(); });
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
      if (!IsFor(step, stacks[k])) continue;
      RETURN_IF_ERROR(AddOverrides(step, i, stacks[k].name, &overrides[k]));
    }
  }
  // Whether values go together shows when a stack has all of its own, as the shards will see them.
  for (size_t k = 0; k < stacks.size(); ++k) {
    if (overrides[k].values.empty()) continue;
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

void CopyRow(const FeatureGradientView& view, int64_t row, int64_t dim, float* to) {
  if (view.dtype == v1::FLOAT32) {
    std::memcpy(to, view.data + row * dim * sizeof(float), dim * sizeof(float));
    return;
  }
  for (int64_t column = 0; column < dim; ++column) to[column] = ElementAt(view, row * dim + column);
}

// Writes the rows of one stack: [samples, width], zero where a feature has no gradient, and in
// padding columns.
void WriteStackRows(const GradientInput& input, const KeptBatch& batch,
                    const preprocess::StackPlan& stack, absl::Span<const int32_t> samples,
                    float* to) {
  const int width = stack.embedding_dim;
  size_t next = 0;
  for (const preprocess::FeaturePlan& plan :
       stack.features) {  // in canonical order, as the samples are
    const FeatureGradientView& view = input.features[plan.feature];
    const int64_t first = batch.feature_sample_begin[plan.feature];
    const int64_t end = first + batch.feature_samples[plan.feature];
    const int64_t dim = stack.tables[plan.table_in_stack].embedding_dim;
    for (; next < samples.size() && samples[next] < end; ++next) {
      float* row = to + next * width;
      const int64_t given = view.data != nullptr ? dim : 0;
      if (given > 0) CopyRow(view, samples[next] - first, dim, row);
      std::fill(row + given, row + width, 0.0f);
    }
  }
  std::fill(to + next * width, to + samples.size() * width, 0.0f);
}

// Whether the gradients of a stack lie in shared memory as shards need them.
bool LiesInPlace(const GradientInput& input, const preprocess::StackPlan& stack) {
  bool any = false;
  for (const preprocess::FeaturePlan& feature : stack.features) {
    const FeatureGradientView& view = input.features[feature.feature];
    if (view.data == nullptr) continue;
    any = true;
    if (!view.shared || view.dtype != v1::FLOAT32 ||
        stack.tables[feature.table_in_stack].embedding_dim != stack.embedding_dim ||
        reinterpret_cast<uintptr_t>(view.data) % sizeof(float) != 0) {
      return false;
    }
  }
  return any;
}

std::vector<shard::FeatureRows<const float>> PlacesOfGradients(const GradientInput& input,
                                                               const KeptBatch& batch,
                                                               const preprocess::StackPlan& stack) {
  std::vector<shard::FeatureRows<const float>> places;
  for (const preprocess::FeaturePlan& feature : stack.features) {
    const auto* const first = reinterpret_cast<const float*>(input.features[feature.feature].data);
    places.push_back({first, stack.embedding_dim, stack.embedding_dim,
                      batch.feature_sample_begin[feature.feature],
                      batch.feature_samples[feature.feature]});
  }
  return places;
}

// By stack: of the gradients that a shard is sent.
std::vector<size_t> FloatsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                   bool in_place) {
  const auto& stacks = batch.model->plan.stacks;
  std::vector<size_t> floats(stacks.size());
  for (size_t i = 0; i < stacks.size(); ++i) {
    if (in_place && LiesInPlace(input, stacks[i])) continue;
    const auto& features = stacks[i].features;
    const bool given = std::any_of(features.begin(), features.end(), [&](const auto& feature) {
      return input.features[feature.feature].data != nullptr;
    });
    floats[i] = given ? batch.shards[shard].samples[i].size() * stacks[i].embedding_dim : 0;
  }
  return floats;
}

}  // namespace

namespace {

// Fills input->features; an error is of the gradient at `*decoded`.
absl::Status DecodeFeatures(const v1::ApplyGradientsRequest& request, const KeptBatch& batch,
                            const RegionServer* regions, GradientInput* decoded_input,
                            int* decoded) {
  const ServedModel& model = *batch.model;
  GradientInput& input = *decoded_input;
  for (int& i = *decoded; i < request.gradients_size(); ++i) {
    const v1::FeatureGradient& gradient = request.gradients(i);
    const auto found = model.features.find(gradient.feature());
    if (found == model.features.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gradients[", i, "].feature is '", gradient.feature(), "', which model '",
          model.config.name(), "' does not have; ",
          KnownNames("features", gradient.feature(), config::FeatureNames(model.config))));
    }
    if (input.features[found->second].data != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradients[", i, "].feature '", gradient.feature(), "' is repeated"));
    }
    RETURN_IF_ERROR(DecodeFeature(gradient, found->second, batch, regions, &input));
  }
  return absl::OkStatus();
}

// Of the first `count` gradients, all features at once; names the first that has a bad value.
absl::Status CheckValues(const v1::ApplyGradientsRequest& request, const KeptBatch& batch,
                         const GradientInput& input, int count, CpuPool* cpu) {
  std::vector<absl::Status> checks(count);
  ParallelFor(cpu, count, [&](int64_t i) {
    const std::string& name = request.gradients(static_cast<int>(i)).feature();
    const int feature = batch.model->features.at(name);
    const v1::TableConfig& table = batch.model->TableOfFeature(feature);
    if (table.on_nonfinite_gradient() == v1::SKIP_ROW) return;
    checks[i] =
        CheckFinite(input.features[feature], batch.feature_samples[feature], table.embedding_dim(),
                    absl::StrCat("gradient of feature '", name, "'"));
  });
  for (const absl::Status& check : checks) RETURN_IF_ERROR(check);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GradientInput> DecodeGradients(const v1::ApplyGradientsRequest& request,
                                              const KeptBatch& batch, const RegionServer* regions,
                                              CpuPool* cpu) {
  const ServedModel& model = *batch.model;
  GradientInput input;
  input.features.resize(model.config.features_size());
  int decoded = 0;
  const absl::Status status = DecodeFeatures(request, batch, regions, &input, &decoded);
  RETURN_IF_ERROR(CheckValues(request, batch, input, decoded, cpu));
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(DecodeHyperparameters(request, model, &input));
  RETURN_IF_ERROR(DecodeStep(request, model, &input));
  return input;
}

bool AnyInPlace(const GradientInput& input, const KeptBatch& batch) {
  const auto& stacks = batch.model->plan.stacks;
  return std::any_of(stacks.begin(), stacks.end(),
                     [&](const auto& stack) { return LiesInPlace(input, stack); });
}

int64_t GradientBytes(const GradientInput& input, const KeptBatch& batch, int shard,
                      bool in_place) {
  const std::vector<size_t> floats = FloatsForShard(input, batch, shard, in_place);
  return static_cast<int64_t>(std::accumulate(floats.begin(), floats.end(), size_t{0}) *
                              sizeof(float));
}

namespace {

struct GradientOwner {
  std::shared_ptr<float> copied;
  std::vector<NamedRegion> regions;
};

}  // namespace

shard::ApplyInput GradientsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                    bool in_place, const std::shared_ptr<SharedBlock>& block) {
  const auto& stacks = batch.model->plan.stacks;
  const KeptShard& kept = batch.shards[shard];
  const std::vector<size_t> floats = FloatsForShard(input, batch, shard, in_place);
  const size_t total = std::accumulate(floats.begin(), floats.end(), size_t{0});
  std::shared_ptr<float> memory =
      block != nullptr
          ? std::shared_ptr<float>(block, reinterpret_cast<float*>(block->data()))
          : std::shared_ptr<float>(
                static_cast<float*>(std::malloc(std::max<size_t>(total, 1) * sizeof(float))),
                std::free);

  shard::ApplyInput result;
  result.step = input.step;
  result.rng_seed = input.rng_seed;
  float* to = memory.get();
  for (size_t i = 0; i < stacks.size(); ++i) {
    shard::StackGradients& stack = result.stacks.emplace_back();
    stack.stack = static_cast<int>(i);
    stack.hyperparameters = input.hyperparameters[i];
    if (in_place && LiesInPlace(input, stacks[i])) {
      stack.features = PlacesOfGradients(input, batch, stacks[i]);
    }
    if (floats[i] == 0) continue;
    WriteStackRows(input, batch, stacks[i], kept.samples[i], to);
    stack.gradients = absl::MakeConstSpan(to, floats[i]);
    to += floats[i];
  }
  result.owner = std::make_shared<GradientOwner>(
      GradientOwner{std::move(memory), in_place ? input.regions : std::vector<NamedRegion>()});
  return result;
}

}  // namespace emberd::server
