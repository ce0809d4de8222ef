// The dense part of the model: a small multi-layer perceptron on Eigen, in float32.
#pragma once

#include <cstdint>
#include <vector>

#include <Eigen/Core>

namespace emberd::demo {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

// inputs -> hidden layers with ReLU -> one logit. All parameters lie in one vector, layer by layer,
// weights [inputs, outputs] row-major before biases, so that they can be summed, compared or sent
// as one piece. Thread-compatible: concurrent calls of const methods are fine.
class Mlp {
 public:
  // What Forward computed and Backward needs.
  struct Activations {
    std::vector<Matrix> layers;  // layers[0]: the input; then the output of each hidden layer
    Vector logits;
  };

  // Weights are uniform in +-sqrt(6 / inputs of the layer), keyed by seed; biases are 0.
  Mlp(int inputs, const std::vector<int>& hidden, uint64_t seed);

  // input [batch, inputs] is taken over.
  void Forward(Matrix input, Activations* result) const;
  // logit_gradients [batch]: derivative of the loss by each logit. Returns the derivative by the
  // input [batch, inputs] and adds those by the parameters to *parameter_gradients
  // (parameter_count() long).
  Matrix Backward(const Activations& activations, const Vector& logit_gradients,
                  Vector* parameter_gradients) const;

  int64_t parameter_count() const { return parameters_.size(); }
  const Vector& parameters() const { return parameters_; }
  Vector& parameters() { return parameters_; }

 private:
  struct Layer {
    int inputs, outputs;
    int64_t weights, biases;  // offsets in the parameter vector
  };
  Eigen::Map<const Matrix> Weights(const Layer& layer) const;

  std::vector<Layer> layers_;
  Vector parameters_;
};

// Adagrad: accumulator += gradient^2; parameter -= learning_rate * gradient / sqrt(accumulator).
// The formula by which emberd updates the embeddings.
class DenseAdagrad {
 public:
  DenseAdagrad(int64_t parameter_count, float learning_rate, float initial_accumulator);
  void Apply(const Vector& gradients, Vector* parameters);

  const Vector& accumulator() const { return accumulator_; }
  Vector& accumulator() { return accumulator_; }

 private:
  float learning_rate_;
  Vector accumulator_;
};

// Mean log loss of logits against labels of 0 and 1, and sigmoid(logit) - label, its derivative by
// each logit before taking the mean.
double LogLoss(const Vector& logits, const std::vector<float>& labels);
Vector LogLossGradient(const Vector& logits, const std::vector<float>& labels);

}  // namespace emberd::demo
