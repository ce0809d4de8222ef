#include "tests/bench/demo/dense_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/bench/demo/random.h"

namespace emberd::demo {

Mlp::Mlp(int inputs, const std::vector<int>& hidden, uint64_t seed) {
  int64_t offset = 0;
  auto add = [&](int in, int out) {
    layers_.push_back({in, out, offset, offset + int64_t{in} * out});
    offset += int64_t{in} * out + out;
    return out;
  };
  int width = inputs;
  for (int outputs : hidden) width = add(width, outputs);
  add(width, 1);

  parameters_ = Vector::Zero(offset);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    const double bound = std::sqrt(6.0 / layer.inputs);
    Draws draws(seed, l, 0x6d6c70);
    for (int64_t i = layer.weights; i < layer.biases; ++i) {
      parameters_[i] = static_cast<float>((2.0 * draws.Uniform() - 1.0) * bound);
    }
  }
}

Eigen::Map<const Matrix> Mlp::Weights(const Layer& layer) const {
  return {parameters_.data() + layer.weights, layer.inputs, layer.outputs};
}

void Mlp::Forward(Matrix input, Activations* result) const {
  result->layers.resize(layers_.size());
  result->layers[0] = std::move(input);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    const auto biases = parameters_.segment(layer.biases, layer.outputs).transpose();
    if (l + 1 == layers_.size()) {
      result->logits = result->layers[l] * Weights(layer).col(0);
      result->logits.array() += biases(0);
    } else {
      Matrix& output = result->layers[l + 1];
      output.noalias() = result->layers[l] * Weights(layer);
      output.rowwise() += biases;
      output = output.cwiseMax(0.0f);
    }
  }
}

Matrix Mlp::Backward(const Activations& activations, const Vector& logit_gradients,
                     Vector* parameter_gradients) const {
  Matrix gradient = logit_gradients;  // by the output of the layer at hand
  for (size_t l = layers_.size(); l-- > 0;) {
    const Layer& layer = layers_[l];
    const Matrix& input = activations.layers[l];
    Eigen::Map<Matrix>(parameter_gradients->data() + layer.weights, layer.inputs, layer.outputs)
        .noalias() += input.transpose() * gradient;
    parameter_gradients->segment(layer.biases, layer.outputs) +=
        gradient.colwise().sum().transpose();
    Matrix by_input = gradient * Weights(layer).transpose();
    // The input of every layer but the first went through ReLU.
    if (l > 0) by_input.array() *= (input.array() > 0.0f).cast<float>();
    gradient = std::move(by_input);
  }
  return gradient;
}

DenseAdagrad::DenseAdagrad(int64_t parameter_count, float learning_rate, float initial_accumulator)
    : learning_rate_(learning_rate),
      accumulator_(Vector::Constant(parameter_count, initial_accumulator)) {}

void DenseAdagrad::Apply(const Vector& gradients, Vector* parameters) {
  accumulator_.array() += gradients.array().square();
  parameters->array() -= learning_rate_ * gradients.array() / accumulator_.array().sqrt();
}

double LogLoss(const Vector& logits, const std::vector<float>& labels) {
  double sum = 0;
  for (Eigen::Index i = 0; i < logits.size(); ++i) {
    // log(1 + exp(-z)) for a click, with z -> -z otherwise; never the exponential of a large
    // number.
    const double z = labels[i] > 0.5f ? logits[i] : -logits[i];
    sum += std::max(-z, 0.0) + std::log1p(std::exp(-std::abs(z)));
  }
  return logits.size() == 0 ? 0.0 : sum / static_cast<double>(logits.size());
}

Vector LogLossGradient(const Vector& logits, const std::vector<float>& labels) {
  const Eigen::Map<const Vector> targets(labels.data(), logits.size());
  return (1.0f / (1.0f + (-logits.array()).exp()) - targets.array()).matrix();
}

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
