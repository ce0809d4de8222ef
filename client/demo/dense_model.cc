#include "client/demo/dense_model.h"

#include <utility>

namespace emberd::demo {

using ConstMap = Eigen::Map<const Matrix>;

DenseModel::DenseModel(const DatasetInfo& info, const Hyperparameters& parameters)
    : features_(static_cast<int>(info.features.size())),
      numeric_count_(info.numeric_count),
      embedding_dim_(parameters.embedding_dim),
      mlp_(features_ * embedding_dim_ + numeric_count_, parameters.hidden, parameters.seed),
      optimizer_(mlp_.parameter_count(), parameters.dense_learning_rate,
                 parameters.dense_initial_accumulator) {}

Matrix DenseModel::Input(const Batch& batch, ActivationSpans activations) const {
  Matrix input(batch.size, features_ * embedding_dim_ + numeric_count_);
  for (int f = 0; f < features_; ++f) {
    input.middleCols(f * embedding_dim_, embedding_dim_) =
        ConstMap(activations[f].data(), batch.size, embedding_dim_);
  }
  input.rightCols(numeric_count_) = ConstMap(batch.numeric.data(), batch.size, numeric_count_);
  return input;
}

Vector DenseModel::Predict(const Batch& batch, ActivationSpans activations) const {
  Mlp::Activations forward;
  mlp_.Forward(Input(batch, activations), &forward);
  return forward.logits;
}

DenseStep DenseModel::Step(const Batch& batch, ActivationSpans activations) const {
  DenseStep step;
  Mlp::Activations forward;
  mlp_.Forward(Input(batch, activations), &forward);
  step.parameter_gradients = Vector::Zero(mlp_.parameter_count());
  const Matrix by_input = mlp_.Backward(forward, LogLossGradient(forward.logits, batch.labels),
                                        &step.parameter_gradients);
  for (int f = 0; f < features_; ++f) {
    std::vector<float> gradient(batch.size * embedding_dim_);
    Eigen::Map<Matrix>(gradient.data(), batch.size, embedding_dim_) =
        by_input.middleCols(f * embedding_dim_, embedding_dim_);
    step.embedding_gradients.push_back(std::move(gradient));
  }
  step.logits = std::move(forward.logits);
  return step;
}

void DenseModel::Update(const Vector& gradient_sum, int64_t examples) {
  if (examples == 0) return;
  optimizer_.Apply(gradient_sum / static_cast<float>(examples), &mlp_.parameters());
}

}  // namespace emberd::demo
