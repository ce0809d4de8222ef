#include "client/demo/dense_model.h"

#include <algorithm>
#include <utility>

#include "client/demo/tree_sum.h"

namespace emberd::demo {

using ConstMap = Eigen::Map<const Matrix>;

DenseModel::DenseModel(const DatasetInfo& info, const Hyperparameters& parameters)
    : features_(static_cast<int>(info.features.size())),
      numeric_count_(info.numeric_count),
      embedding_dim_(parameters.embedding_dim),
      mlp_(features_ * embedding_dim_ + numeric_count_, parameters.hidden, parameters.seed),
      optimizer_(mlp_.parameter_count(), parameters.dense_learning_rate,
                 parameters.dense_initial_accumulator) {}

Matrix DenseModel::Input(const Batch& batch, ActivationSpans activations, int64_t first,
                         int64_t count) const {
  Matrix input(count, features_ * embedding_dim_ + numeric_count_);
  for (int f = 0; f < features_; ++f) {
    input.middleCols(f * embedding_dim_, embedding_dim_) =
        ConstMap(activations[f].data() + first * embedding_dim_, count, embedding_dim_);
  }
  input.rightCols(numeric_count_) =
      ConstMap(batch.numeric.data() + first * numeric_count_, count, numeric_count_);
  return input;
}

Vector DenseModel::Predict(const Batch& batch, ActivationSpans activations) const {
  Mlp::Activations forward;
  mlp_.Forward(Input(batch, activations, 0, batch.size), &forward);
  return forward.logits;
}

DenseStep DenseModel::Step(const Batch& batch, ActivationSpans activations) const {
  DenseStep step;
  step.logits.resize(batch.size);
  for (int f = 0; f < features_; ++f) {
    step.embedding_gradients.emplace_back(batch.size * embedding_dim_);
  }
  std::vector<Vector> gradients;
  for (int64_t first = 0; first < batch.size; first += kSliceExamples) {
    const int64_t count = std::min(kSliceExamples, batch.size - first);
    gradients.push_back(StepSlice(batch, activations, first, count, &step));
  }
  step.parameter_gradients = SumByTree(std::move(gradients));
  return step;
}

// Returns the gradient of the parameters.
Vector DenseModel::StepSlice(const Batch& batch, ActivationSpans activations, int64_t first,
                             int64_t count, DenseStep* step) const {
  Mlp::Activations forward;
  mlp_.Forward(Input(batch, activations, first, count), &forward);
  step->logits.segment(first, count) = forward.logits;
  const std::vector<float> labels(batch.labels.begin() + first,
                                  batch.labels.begin() + first + count);
  Vector gradient = Vector::Zero(mlp_.parameter_count());
  const Matrix by_input =
      mlp_.Backward(forward, LogLossGradient(forward.logits, labels), &gradient);
  for (int f = 0; f < features_; ++f) {
    Eigen::Map<Matrix>(step->embedding_gradients[f].data() + first * embedding_dim_, count,
                       embedding_dim_) = by_input.middleCols(f * embedding_dim_, embedding_dim_);
  }
  return gradient;
}

std::vector<float> DenseModel::State() const {
  const Vector& parameters = mlp_.parameters();
  const Vector& accumulator = optimizer_.accumulator();
  std::vector<float> state(parameters.begin(), parameters.end());
  state.insert(state.end(), accumulator.begin(), accumulator.end());
  return state;
}

bool DenseModel::SetState(const std::vector<float>& state) {
  const int64_t count = mlp_.parameter_count();
  if (static_cast<int64_t>(state.size()) != 2 * count) return false;
  mlp_.parameters() = Eigen::Map<const Vector>(state.data(), count);
  optimizer_.accumulator() = Eigen::Map<const Vector>(state.data() + count, count);
  return true;
}

void DenseModel::Update(const Vector& gradient_sum, int64_t examples) {
  if (examples == 0) return;
  optimizer_.Apply(gradient_sum / static_cast<float>(examples), &mlp_.parameters());
}

}  // namespace emberd::demo
