#include "client/demo/mlp.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/demo/random.h"

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

}  // namespace emberd::demo
