#include "client/demo/evaluate.h"

#include <algorithm>
#include <vector>

#include "client/demo/metrics.h"

namespace emberd::demo {

namespace {
constexpr int64_t kBatch = 2048;
}

absl::StatusOr<Evaluation> EvaluateHeldOut(const Dataset& dataset, const DenseModel& dense,
                                           Embeddings* embeddings, int64_t examples,
                                           const std::function<bool()>& cancelled) {
  Vector logits(examples);
  std::vector<float> labels;
  Batch batch;
  for (int64_t first = 0; first < examples; first += kBatch) {
    if (cancelled()) return absl::CancelledError("the evaluation was cancelled");
    if (auto s = dataset.ReadTest(first, std::min(kBatch, examples - first), &batch); !s.ok())
      return s;
    const absl::StatusOr<client::LookupResult> lookup = embeddings->Lookup(batch);
    if (!lookup.ok()) return lookup.status();
    std::vector<absl::Span<const float>> activations;
    for (const client::Activation& activation : lookup->activations) {
      activations.push_back(activation.values);
    }
    logits.segment(first, batch.size) = dense.Predict(batch, activations);
    labels.insert(labels.end(), batch.labels.begin(), batch.labels.end());
  }
  return Evaluation{Auc({logits.data(), labels.size()}, labels), LogLoss(logits, labels)};
}

absl::StatusOr<double> PlantedAuc(const Dataset& dataset, int64_t examples) {
  Batch batch;
  if (auto s = dataset.ReadTest(0, examples, &batch); !s.ok()) return s;
  return batch.true_probability.empty() ? -1.0 : Auc(batch.true_probability, batch.labels);
}

}  // namespace emberd::demo
