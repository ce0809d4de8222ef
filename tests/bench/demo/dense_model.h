// The dense part of the model, which the trainers keep: a small multi-layer perceptron on Eigen, in
// float32. Activations of the embeddings in, their gradients out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <Eigen/Core>

#include "absl/types/span.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/experiment.h"

namespace emberd::demo {

// The sum of vectors of equal length by the balanced binary tree over their places: neighbours
// first, then pairs of pairs. So the sum over the parts of two trainers is that over all parts of
// one trainer, if each of the two has the same power of two of them. Empty vectors stand for
// nothing; empty if all are.
template <typename Vector>
Vector SumByTree(std::vector<Vector> parts) {
  for (size_t step = 1; step < parts.size(); step *= 2) {
    for (size_t i = 0; i + step < parts.size(); i += 2 * step) {
      Vector &left = parts[i], &right = parts[i + step];
      if (left.size() == 0) std::swap(left, right);
      for (decltype(right.size()) k = 0; k < right.size(); ++k) left[k] += right[k];
    }
  }
  return parts.empty() ? Vector() : std::move(parts.front());
}

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

// What a batch's forward and backward pass gave. Gradients are sums over the examples, not means.
struct DenseStep {
  Vector logits;
  // Per feature, row-major [batch, embedding_dim].
  std::vector<std::vector<float>> embedding_gradients;
  Vector parameter_gradients;  // empty for an empty batch
};

// A step works on slices of so many examples, whose gradients SumByTree adds: so trainers that
// divide a batch among them get the bits that one trainer gets for all of it, if their batches are
// a power of two of slices.
inline constexpr int64_t kSliceExamples = 128;

// The MLP over the activations of all features, in their order, and the numbers of an example, with
// its optimizer. Equal calls in equal order give equal bits, so trainers that apply the same sums
// stay equal. Thread-compatible.
class DenseModel {
 public:
  DenseModel(const DatasetInfo& info, const Hyperparameters& parameters);

  // activations: per feature, row-major [batch.size, embedding_dim].
  using ActivationSpans = absl::Span<const absl::Span<const float>>;
  Vector Predict(const Batch& batch, ActivationSpans activations) const;
  DenseStep Step(const Batch& batch, ActivationSpans activations) const;
  // Updates the parameters with the mean gradient of `examples` examples, given as their sum.
  void Update(const Vector& gradient_sum, int64_t examples);

  int64_t parameter_count() const { return mlp_.parameter_count(); }

  // Parameters and optimizer state, to go on from in another process.
  std::vector<float> State() const;
  // False if the state is not of a model like this.
  bool SetState(const std::vector<float>& state);

 private:
  // Of examples [first, first + count).
  Matrix Input(const Batch& batch, ActivationSpans activations, int64_t first, int64_t count) const;
  Vector StepSlice(const Batch& batch, ActivationSpans activations, int64_t first, int64_t count,
                   DenseStep* step) const;

  int features_, numeric_count_, embedding_dim_;
  Mlp mlp_;
  DenseAdagrad optimizer_;
};

}  // namespace emberd::demo
