#include "server/step/served_model.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "server/host/hosted_models.h"
#include "server/ops/logging.h"

namespace emberd::step {

int64_t CountSketch::Upper(int64_t count) {
  if (count <= 16) return count;
  // Steps of an eighth of the largest power of two below the count.
  const auto below = static_cast<uint64_t>(count - 1);
  const uint64_t step = std::bit_floor(below) / 8;
  return static_cast<int64_t>(below / step * step + step);
}

void CountSketch::Add(int64_t count) {
  max_ = std::max(max_, count);
  ++buckets_[Upper(count)];
}

v1::CountSketch CountSketch::ToProto() const {
  v1::CountSketch sketch;
  sketch.set_max(max_);
  for (const auto& [upper, count] : buckets_) {
    v1::CountSketch::Bucket* bucket = sketch.add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
  return sketch;
}

void ObservedCounts::Observe(const v1::BatchStatistics& statistics, bool refused) {
  absl::MutexLock lock(&mutex_);
  const size_t stacks = std::min<size_t>(stacks_.size(), statistics.stacks_size());
  for (size_t k = 0; k < stacks; ++k) {
    const v1::StackStatistics& batch = statistics.stacks(static_cast<int>(k));
    stacks_[k].ids.Add(batch.max_ids_per_partition());
    stacks_[k].unique_ids.Add(batch.max_unique_ids_per_partition());
    stacks_[k].ids_per_sample.Add(batch.ids_per_chip_per_sample());
    stacks_[k].minibatches.Add(statistics.num_minibatches());
    if (refused) continue;
    v1::StackStats& totals = stacks_[k].totals;
    totals.set_batches(totals.batches() + 1);
    totals.set_ids(totals.ids() + batch.ids());
    totals.set_unique_ids(totals.unique_ids() + batch.unique_ids());
    totals.set_dropped_ids(totals.dropped_ids() + batch.dropped_ids());
  }
}

std::vector<v1::StackStats> ObservedCounts::Stats(const preprocess::Plan& plan) const {
  absl::MutexLock lock(&mutex_);
  std::vector<v1::StackStats> stats;
  for (size_t k = 0; k < stacks_.size(); ++k) {
    v1::StackStats& stack = stats.emplace_back(stacks_[k].totals);
    stack.set_stack(plan.stacks[k].name);
    stack.set_max_ids_per_partition(static_cast<int32_t>(plan.stacks[k].limits.ids));
    stack.set_largest_ids_per_partition(stacks_[k].ids.max());
    stack.set_max_unique_ids_per_partition(static_cast<int32_t>(plan.stacks[k].limits.unique));
    stack.set_largest_unique_ids_per_partition(stacks_[k].unique_ids.max());
  }
  return stats;
}

v1::GetLimitsResponse ObservedCounts::Limits(const preprocess::Plan& plan) const {
  absl::MutexLock lock(&mutex_);
  v1::GetLimitsResponse response;
  for (size_t k = 0; k < stacks_.size(); ++k) {
    v1::StackLimits* stack = response.add_stacks();
    stack->set_stack(plan.stacks[k].name);
    preprocess::WriteLimits(plan.stacks[k].limits, stack);
    *stack->mutable_ids() = stacks_[k].ids.ToProto();
    *stack->mutable_unique_ids() = stacks_[k].unique_ids.ToProto();
    *stack->mutable_ids_per_sample() = stacks_[k].ids_per_sample.ToProto();
    *stack->mutable_minibatches() = stacks_[k].minibatches.ToProto();
  }
  return response;
}

int64_t MissingGradients::Observe(const v1::ModelConfig& config, const std::vector<bool>& given) {
  int64_t missing = 0;
  for (size_t f = 0; f < named_.size(); ++f) {
    if (given[f]) continue;
    ++missing;
    if (named_[f].exchange(true, std::memory_order_relaxed)) continue;
    ops::Log(
        ops::LogLevel::kWarning,
        "a feature has no gradient: its rows are updated with a zero gradient, which still changes "
        "them if the optimizer has momentum or decay (logged once for each feature)",
        {{"model", config.name()}, {"feature", config.features(static_cast<int>(f)).name()}});
  }
  return missing;
}

void ServedModel::SetLimits(const internal::v1::ModelLimits& limits) const {
  absl::MutexLock lock(&live_limits->mutex);
  if (limits.version() <= live_limits->newest.version()) return;
  live_limits->newest = limits;
  std::vector<preprocess::PartitionLimits> by_stack;
  for (const preprocess::StackPlan& stack : plan.stacks) {
    preprocess::PartitionLimits& to = by_stack.emplace_back(stack.limits);
    for (const v1::StackLimit& set : limits.stacks()) {
      if (set.stack() != stack.name) continue;
      to.ids = set.max_ids_per_partition();
      to.unique = set.max_unique_ids_per_partition();
      if (set.has_max_ids_per_chip_per_sample()) {
        to.ids_per_sample = set.max_ids_per_chip_per_sample();
      }
      if (set.has_max_minibatches_per_sparsecore()) {
        to.minibatches = set.max_minibatches_per_sparsecore();
      }
    }
    metrics->SetLimits(static_cast<int>(by_stack.size()) - 1, to.ids, to.unique);
  }
  preprocessor->SetLimits(std::move(by_stack));
}

preprocess::Plan ServedModel::PlanNow() const {
  preprocess::Plan now = plan;
  const std::vector<preprocess::PartitionLimits> limits = preprocessor->limits();
  for (size_t k = 0; k < limits.size(); ++k) now.stacks[k].limits = limits[k];
  return now;
}

std::vector<int64_t> ServedModel::ActivationShape(int feature, int64_t samples) const {
  std::vector<int64_t> shape = sample_shapes[feature];
  shape.front() = samples / shape.front();
  return shape;
}

void ServedModel::ObserveUpdate(const std::vector<bool>& given) const {
  const int64_t missing = missing_gradients->Observe(config, given);
  if (missing > 0) metrics->Add(ops::MetricId::kMissingGradients, missing);
}

void ServedModel::Observe(const preprocess::PreprocessedBatch& batch) const {
  const absl::Span<const int64_t> samples = batch.feature_samples();
  if (samples.empty()) return;
  metrics->Add(ops::MetricId::kExamples, *std::max_element(samples.begin(), samples.end()));
  metrics->ObserveBatch(batch.statistics());
  observed->Observe(batch.statistics());
}

absl::Status CheckTrainable(const ServedModel& model) {
  if (config::CanTrain(model.config)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Unsupported optimizer in minibatching mode: the tables of model '", model.config.name(),
      "' have optimizer none, so they are looked up and not updated; to train, declare a model "
      "with "
      "another optimizer (restore_from gives it the rows of a checkpoint)"));
}

absl::Status CheckInference(const ServedModel& model, bool inference) {
  if (inference || config::CanTrain(model.config)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("inference is false; it must be true for model '", model.config.name(),
                   "', whose tables have optimizer none: no update can follow"));
}

std::string ServesText(const internal::v1::ServedRows& serves) {
  return serves.model().empty() ? "" : absl::StrCat(serves.model(), "/", serves.checkpoint());
}

absl::Status CheckNotReadOnly(const ServedModel& model, const std::string& what) {
  if (!model.read_only()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "model '", model.config.name(), "' serves checkpoint '", ServesText(model.serves),
      "', read-only, so ", what, "; `emberctl serve` has it serve another checkpoint"));
}

absl::StatusOr<std::shared_ptr<ServedModel>> MakeServedModel(v1::ModelConfig config,
                                                             const preprocess::Topology& topology,
                                                             CpuPool* cpu, ops::Metrics* metrics) {
  auto model = std::make_shared<ServedModel>();
  model->id = config::ModelFingerprint(config);
  model->config = std::move(config);
  ASSIGN_OR_RETURN(preprocess::Plan plan, preprocess::MakePlan(model->config, topology));
  model->plan = std::move(plan);
  model->shard_stacks = host::ModelSpecFromPlan(model->id, model->config, model->plan, 0).stacks;
  model->preprocessor =
      std::make_shared<preprocess::Preprocessor>(&model->config, &model->plan, cpu);
  for (int i = 0; i < model->config.tables_size(); ++i)
    model->tables[model->config.tables(i).name()] = i;
  for (int i = 0; i < model->config.features_size(); ++i) {
    const v1::FeatureConfig& feature = model->config.features(i);
    model->features[feature.name()] = i;
    std::vector<int64_t>& shape = model->sample_shapes.emplace_back();
    shape.assign(feature.output_shape().begin(), feature.output_shape().end());
    shape.resize(std::max<size_t>(shape.size(), 1));
    shape.front() = config::SampleBlock(feature);
    shape.push_back(model->TableOfFeature(i).embedding_dim());
  }
  std::vector<std::string> stacks;
  for (const preprocess::StackPlan& stack : model->plan.stacks) stacks.push_back(stack.name);
  model->observed = std::make_shared<ObservedCounts>(stacks.size());
  model->missing_gradients = std::make_shared<MissingGradients>(model->config.features_size());
  model->metrics = metrics->Model(model->config.name(), stacks);
  for (size_t i = 0; i < model->plan.stacks.size(); ++i) {
    const preprocess::PartitionLimits& limits = model->plan.stacks[i].limits;
    model->metrics->SetLimits(static_cast<int>(i), limits.ids, limits.unique);
  }
  return model;
}

}  // namespace emberd::step
