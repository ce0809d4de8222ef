// How good the model in the cluster is on held-out examples.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "client/demo/dataset.h"
#include "client/demo/dense_model.h"
#include "client/demo/embeddings.h"

namespace emberd::demo {

struct Evaluation {
  double auc = 0;
  double log_loss = 0;
};

// Looks the first `examples` held-out ones up (inference only: nothing changes) and scores them.
// CANCELLED once `cancelled`, asked between batches, says so.
absl::StatusOr<Evaluation> EvaluateHeldOut(const Dataset& dataset, const DenseModel& dense,
                                           Embeddings* embeddings, int64_t examples,
                                           const std::function<bool()>& cancelled);

// AUC over the same examples of the very probabilities by which their labels were drawn: no model
// can be expected to do better. -1 where the dataset does not know them.
absl::StatusOr<double> PlantedAuc(const Dataset& dataset, int64_t examples);

}  // namespace emberd::demo
