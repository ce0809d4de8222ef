#include "server/step/gradients.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/buffers.h"
#include "base/floats.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/optimizers.h"
#include "server/step/request_reader.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::step {

// ---- Reading them

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
    return absl::InvalidArgumentError(absl::StrCat(path, ": dtype is ", TypeText(tensor.dtype()),
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

// ---- What a shard is sent: a row for each sample

namespace {

// Whether any feature of a stack has a gradient.
bool AnyGiven(const GradientInput& input, const preprocess::StackPlan& stack) {
  return std::any_of(stack.features.begin(), stack.features.end(),
                     [&](const auto& feature) { return input.features[feature.feature].given(); });
}

// Copies `count` elements, float32 or bfloat16 at any alignment, as floats.
void CopyFloats(const char* elements, v1::DataType dtype, int64_t count, float* to) {
  if (dtype == v1::FLOAT32) {
    std::memcpy(to, elements, count * sizeof(float));
  } else {
    FromBfloat16Bytes(elements, absl::MakeSpan(to, count));
  }
}

// So many floats: of the block, which has as many bytes, or of their own.
std::shared_ptr<float> MemoryFor(size_t floats, const std::shared_ptr<SharedBlock>& block) {
  if (block != nullptr) return {block, reinterpret_cast<float*>(block->data())};
  const size_t bytes = std::max<size_t>(floats, 1) * sizeof(float);
  return {static_cast<float*>(std::malloc(bytes)), std::free};
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
    const int64_t given = view.given() ? dim : 0;
    for (; next < samples.size() && samples[next] < end; ++next) {
      float* to_row = to + next * width;
      if (given > 0) {
        const int64_t row = samples[next] - first;
        CopyFloats(view.data + row * dim * ElementSize(view.dtype), view.dtype, dim, to_row);
      }
      std::fill(to_row + given, to_row + width, 0.0f);
    }
  }
  std::fill(to + next * width, to + samples.size() * width, 0.0f);
}

// Whether the gradients of a stack lie in shared memory as shards need them.
bool LiesInPlace(const GradientInput& input, const preprocess::StackPlan& stack) {
  bool any = false;
  for (const preprocess::FeaturePlan& feature : stack.features) {
    const FeatureGradientView& view = input.features[feature.feature];
    if (!view.given()) continue;
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
    floats[i] = AnyGiven(input, stacks[i])
                    ? batch.shards[shard].samples[i].size() * stacks[i].embedding_dim
                    : 0;
  }
  return floats;
}

}  // namespace

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

shard::ApplyInput GradientsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                    bool in_place, const std::shared_ptr<SharedBlock>& block) {
  const auto& stacks = batch.model->plan.stacks;
  const KeptShard& kept = batch.shards[shard];
  const std::vector<size_t> floats = FloatsForShard(input, batch, shard, in_place);
  const size_t total = std::accumulate(floats.begin(), floats.end(), size_t{0});
  std::shared_ptr<float> memory = MemoryFor(total, block);

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
  result.owner = KeepBoth(std::move(memory), in_place ? input.regions : std::vector<NamedRegion>());
  return result;
}

// ---- Or a sum for each row of a table

namespace {

// Sums are sent if they have at most this share of the samples' rows: below that, they are worth
// what it takes to make them.
constexpr double kMostRows = 0.8;
// With more entries of a sample, summing costs more than sending, and shards share it.
constexpr int64_t kMostEntriesPerSample = 4;

// A stack of the plan whose gradients become sums.
struct SummedStack {
  int index = 0;
  const shard::StackEntries* entries = nullptr;

  int64_t rows() const { return entries->partition_ends.back(); }
};

// Whether the sums of its rows are clearly fewer bytes than the gradients of its samples.
bool AreFewer(const shard::StackEntries& entries) {
  const auto samples = static_cast<double>(entries.samples.size());
  const auto rows = static_cast<double>(entries.partition_ends.back());
  return rows > 0 && rows <= kMostRows * samples &&
         static_cast<double>(entries.entry_count) <= kMostEntriesPerSample * samples;
}

std::vector<SummedStack> StacksToSum(const GradientInput& input, const KeptBatch& batch,
                                     const KeptShard& shard) {
  std::vector<SummedStack> stacks;
  for (size_t i = 0; i < shard.entries.size(); ++i) {
    const shard::StackEntries* const entries = shard.entries[i].get();
    if (entries != nullptr && AreFewer(*entries) && AnyGiven(input, batch.model->plan.stacks[i])) {
      stacks.push_back({static_cast<int>(i), entries});
    }
  }
  return stacks;
}

// Writes a sum for each row, 0 where it has no gradient. Whether all are finite.
bool SumStack(const GradientInput& input, const KeptBatch& batch, const SummedStack& stack,
              float* sums) {
  const preprocess::StackPlan& plan = batch.model->plan.stacks[stack.index];
  const shard::StackEntries& entries = *stack.entries;
  std::vector<uint8_t> begun(stack.rows());
  bool finite = true;
  for (size_t f = 0; f < plan.features.size(); ++f) {
    const preprocess::FeaturePlan& of = plan.features[f];
    const FeatureGradientView& view = input.features[of.feature];
    if (!view.given()) continue;
    shard::RowSumArgs args;
    args.gradients = view.data;
    args.dtype = view.dtype;
    args.first_sample = batch.feature_sample_begin[of.feature];
    args.dim = plan.tables[of.table_in_stack].embedding_dim;
    args.width = plan.embedding_dim;
    args.samples = entries.samples.data();
    args.offsets = entries.offsets.data();
    args.entries = entries.entries.data();
    args.begin = entries.feature_offsets[f];
    args.end = entries.feature_offsets[f + 1];
    args.sums = sums;
    args.begun = begun.data();
    finite = shard::AddToRowSums(args) && finite;
  }
  for (size_t row = 0; row < begun.size(); ++row) {
    if (begun[row] == 0) std::fill_n(sums + row * plan.embedding_dim, plan.embedding_dim, 0.0f);
  }
  return finite;
}

}  // namespace

std::optional<ShardGradients> SumsForShard(const GradientInput& input, const KeptBatch& batch,
                                           int shard, const TakeBlock& take_block) {
  const auto& plans = batch.model->plan.stacks;
  const std::vector<SummedStack> stacks = StacksToSum(input, batch, batch.shards[shard]);
  if (stacks.empty()) return std::nullopt;
  size_t floats = 0;
  GradientInput others = input;
  for (const SummedStack& stack : stacks) {
    floats += stack.rows() * plans[stack.index].embedding_dim;
    for (const auto& feature : plans[stack.index].features) others.features[feature.feature] = {};
  }
  ShardGradients result;
  if (take_block != nullptr) {
    result.block = take_block(static_cast<int64_t>(floats * sizeof(float)));
  }
  // A block holds one array after another, of all stacks.
  if (result.block != nullptr && GradientBytes(others, batch, shard, /*in_place=*/false) > 0) {
    return std::nullopt;
  }
  const std::shared_ptr<float> memory = MemoryFor(floats, result.block);
  result.input = GradientsForShard(others, batch, shard, /*in_place=*/false);
  float* to = memory.get();
  for (const SummedStack& stack : stacks) {
    if (!SumStack(input, batch, stack, to)) return std::nullopt;
    shard::StackGradients& sent = result.input.stacks[stack.index];
    sent.of_rows = true;
    sent.gradients = absl::MakeConstSpan(to, stack.rows() * plans[stack.index].embedding_dim);
    to += sent.gradients.size();
  }
  result.input.owner = KeepBoth(std::move(result.input.owner), memory);
  return result;
}

}  // namespace emberd::step
