// One step of the trainer's share of the model: activations of the embeddings in, their gradients
// out.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/demo/dataset.h"
#include "client/demo/hyperparameters.h"
#include "client/demo/mlp.h"

namespace emberd::demo {

// What a batch's forward and backward pass gave. Gradients are sums over the examples, not means.
struct DenseStep {
  Vector logits;
  std::vector<std::vector<float>>
      embedding_gradients;     // per feature, row-major [batch, embedding_dim]
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
