// The same model trained in one process by plain loops, with no emberd: what the cluster's result
// is held against.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/dense_model.h"
#include "tests/bench/demo/experiment.h"

namespace emberd::demo {

// An embedding table as an array, with Adagrad.
class PlainTable {
 public:
  PlainTable(int64_t rows, int dim, client::Combiner combiner, float initial_accumulator);

  // Row-major [rows, dim].
  std::vector<float>& weights() { return weights_; }

  // Row-major [samples, dim]: each sample's rows, pooled.
  std::vector<float> Lookup(const FeatureColumn& column, int64_t samples) const;
  // Adds the gradients of a batch to those of its rows.
  void Add(const FeatureColumn& column, int64_t samples, absl::Span<const float> gradients);
  // Updates every row of the batches since the last Update once, with the sum of its gradients.
  void Update(float learning_rate);

 private:
  float Gain(size_t ids) const;

  int dim_;
  client::Combiner combiner_;
  std::vector<float> weights_, accumulator_;
  std::vector<float> row_gradient_;  // of touched rows; zero elsewhere
  std::vector<int32_t> touched_;     // rows may repeat
};

class PlainTrainer {
 public:
  // Rows start uniform in +-embedding_initial_range; overwrite tables() for other values.
  PlainTrainer(const Dataset* dataset, const Hyperparameters& parameters, const Schedule& schedule);

  std::vector<PlainTable>& tables() { return tables_; }  // per feature

  // Runs one round: all trainers' batches look up the same state, then their gradients make one
  // update, as in a group of trainers. In a pipelined schedule the update comes after the next
  // round's lookups. If `logits` is given, the predictions made before the update and the labels
  // are appended.
  absl::Status Round(int64_t round, std::vector<float>* logits, std::vector<float>* labels);
  // Makes the update that a pipelined schedule has left.
  void Finish();
  // AUC over the first `examples` held-out ones.
  absl::StatusOr<double> Evaluate(int64_t examples) const;

 private:
  void UpdateTables();
  std::vector<std::vector<float>> Lookup(const Batch& batch) const;

  const Dataset* dataset_;
  Hyperparameters parameters_;
  Schedule schedule_;
  DenseModel dense_;
  std::vector<PlainTable> tables_;
};

}  // namespace emberd::demo
