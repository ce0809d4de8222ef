#include "tests/bench/demo/plain_trainer.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "tests/bench/demo/dense_model.h"
#include "tests/bench/demo/metrics.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace {
std::vector<absl::Span<const float>> Spans(const std::vector<std::vector<float>>& activations) {
  return {activations.begin(), activations.end()};
}
}  // namespace

PlainTable::PlainTable(int64_t rows, int dim, client::Combiner combiner, float initial_accumulator)
    : dim_(dim),
      combiner_(combiner),
      weights_(rows * dim),
      accumulator_(rows * dim, initial_accumulator),
      row_gradient_(rows * dim) {}

float PlainTable::Gain(size_t ids) const {
  switch (combiner_) {
    case client::Combiner::kMean:
      return 1.0f / static_cast<float>(ids);
    case client::Combiner::kSqrtn:
      return 1.0f / std::sqrt(static_cast<float>(ids));
    case client::Combiner::kSum:
      break;
  }
  return 1.0f;
}

std::vector<float> PlainTable::Lookup(const FeatureColumn& column, int64_t samples) const {
  std::vector<float> activations(samples * dim_);
  for (int64_t i = 0; i < samples; ++i) {
    const absl::Span<const int32_t> ids = column.IdsOf(i);
    for (int64_t id : ids) {
      for (int c = 0; c < dim_; ++c) {
        activations[i * dim_ + c] += Gain(ids.size()) * weights_[id * dim_ + c];
      }
    }
  }
  return activations;
}

void PlainTable::Add(const FeatureColumn& column, int64_t samples,
                     absl::Span<const float> gradients) {
  for (int64_t i = 0; i < samples; ++i) {
    const absl::Span<const int32_t> ids = column.IdsOf(i);
    for (int64_t id : ids) {
      for (int c = 0; c < dim_; ++c) {
        row_gradient_[id * dim_ + c] += Gain(ids.size()) * gradients[i * dim_ + c];
      }
    }
  }
  touched_.insert(touched_.end(), column.ids.begin(), column.ids.end());
}

void PlainTable::Update(float learning_rate) {
  // A row that comes again is updated with a zero gradient, which changes nothing.
  for (int64_t id : touched_) {
    for (int64_t k = id * dim_; k < (id + 1) * dim_; ++k) {
      const float gradient = row_gradient_[k];
      row_gradient_[k] = 0;
      accumulator_[k] += gradient * gradient;
      weights_[k] -= learning_rate * gradient / std::sqrt(accumulator_[k]);
    }
  }
  touched_.clear();
}

PlainTrainer::PlainTrainer(const Dataset* dataset, const Hyperparameters& parameters,
                           const Schedule& schedule)
    : dataset_(dataset),
      parameters_(parameters),
      schedule_(schedule),
      dense_(dataset->info(), parameters) {
  for (const FeatureInfo& feature : dataset->info().features) {
    PlainTable& table =
        tables_.emplace_back(feature.vocabulary_size, parameters.embedding_dim, feature.combiner,
                             parameters.embedding_initial_accumulator);
    Draws draws(parameters.seed, tables_.size(), 0x726f7773);
    for (float& weight : table.weights()) {
      weight = parameters.embedding_initial_range * static_cast<float>(2 * draws.Uniform() - 1);
    }
  }
}

std::vector<std::vector<float>> PlainTrainer::Lookup(const Batch& batch) const {
  std::vector<std::vector<float>> activations;
  for (size_t f = 0; f < tables_.size(); ++f) {
    activations.push_back(tables_[f].Lookup(batch.features[f], batch.size));
  }
  return activations;
}

absl::Status PlainTrainer::Round(int64_t round, std::vector<float>* logits,
                                 std::vector<float>* labels) {
  std::vector<Batch> batches(schedule_.trainers);
  std::vector<DenseStep> steps;
  std::vector<Vector> gradients;
  int64_t examples = 0;
  for (int rank = 0; rank < schedule_.trainers; ++rank) {
    const ExampleRange range = schedule_.Range(round, rank);
    Batch& batch = batches[rank];
    RETURN_IF_ERROR(dataset_->ReadTrain(range.first, range.count, &batch));
    const std::vector<std::vector<float>> activations = Lookup(batch);
    steps.push_back(dense_.Step(batch, Spans(activations)));
    const DenseStep& step = steps.back();
    gradients.push_back(step.parameter_gradients);
    examples += batch.size;
    if (logits != nullptr) logits->insert(logits->end(), step.logits.begin(), step.logits.end());
    if (labels != nullptr) labels->insert(labels->end(), batch.labels.begin(), batch.labels.end());
  }
  dense_.Update(SumByTree(std::move(gradients)), examples);
  if (schedule_.pipelined) UpdateTables();
  for (int rank = 0; rank < schedule_.trainers; ++rank) {
    for (size_t f = 0; f < tables_.size(); ++f) {
      tables_[f].Add(batches[rank].features[f], batches[rank].size,
                     steps[rank].embedding_gradients[f]);
    }
  }
  if (!schedule_.pipelined) UpdateTables();
  return absl::OkStatus();
}

void PlainTrainer::UpdateTables() {
  for (PlainTable& table : tables_) table.Update(parameters_.embedding_learning_rate);
}

void PlainTrainer::Finish() { UpdateTables(); }

absl::StatusOr<double> PlainTrainer::Evaluate(int64_t examples) const {
  std::vector<float> scores, labels;
  Batch batch;
  for (int64_t first = 0; first < examples; first += schedule_.batch_size) {
    const int64_t count = std::min(schedule_.batch_size, examples - first);
    RETURN_IF_ERROR(dataset_->ReadTest(first, count, &batch));
    const std::vector<std::vector<float>> activations = Lookup(batch);
    const Vector logits = dense_.Predict(batch, Spans(activations));
    scores.insert(scores.end(), logits.begin(), logits.end());
    labels.insert(labels.end(), batch.labels.begin(), batch.labels.end());
  }
  return Auc(scores, labels);
}

}  // namespace emberd::demo
