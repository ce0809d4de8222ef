// What a step hands to the cluster and gets back: ids, activations, gradients. Spans do not own
// their memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace emberd::client {

// Ids, row splits or sparse indices in the width in which the trainer has them. A vector of either
// converts by itself.
using IntSpan = std::variant<absl::Span<const int32_t>, absl::Span<const int64_t>>;

// The same number of ids for every sample: samples = ids.size() / ids_per_sample.
struct DenseIds {
  IntSpan ids;  // row-major [samples, ids_per_sample]
  int64_t ids_per_sample = 1;
  // Of `ids`, as FeatureConfig.output_shape says; ids_per_sample has no effect then. Empty: it has.
  std::vector<int64_t> shape = {};
};
// n coordinates of a sparse [samples, ...] matrix of ids.
struct SparseIds {
  IntSpan indices;  // row-major [n, 2]: (sample, position); samples non-decreasing
  IntSpan values;   // [n] ids
  int64_t samples = 0;
};
// Sample i has the ids values[row_splits[i] : row_splits[i + 1]].
struct RaggedIds {
  IntSpan row_splits;  // [samples + 1]
  IntSpan values;
};

// The ids of one feature. Everything it points at must live until the call returns.
struct FeatureIds {
  std::string_view feature;
  std::variant<DenseIds, SparseIds, RaggedIds> ids;
  absl::Span<const float> weights = {};  // one per id, or a single one for all; empty: all 1
};

struct LookupOptions {
  // True: look only. The result has no batch, and nothing stays on the server.
  bool inference = false;
  absl::Duration deadline = absl::ZeroDuration();  // zero: the client's
};

// Names a batch that the cluster keeps between Lookup and ApplyGradients. It lives in the
// coordinator that made it.
struct BatchHandle {
  uint64_t value = 0;   // 0: none
  int coordinator = 0;  // index in ClientOptions::addresses
};

// One feature's activations, row-major [samples, dim]. `values` points into the LookupResult.
struct Activation {
  std::string feature;
  int64_t samples = 0;
  int64_t dim = 0;
  absl::Span<const float> values;
  int64_t row_stride = 0;  // floats from one row to the next; 0: dim
};

// What one batch needed: see statistics.proto.
struct StackStatistics {
  std::string stack;
  int64_t ids = 0;
  int64_t unique_ids = 0;
  int64_t duplicate_ids = 0;
  int64_t max_ids_per_partition = 0;
  int64_t max_unique_ids_per_partition = 0;
  int64_t required_buffer_size = 0;
  int64_t dropped_ids = 0;
  // What the step would cost on a real chip.
  int64_t pad_cells = 0;
  int64_t bytes_gathered = 0;
  int64_t activation_bytes_per_sparsecore = 0;
  double imbalance = 0;                        // fullest partition over the mean; 0: no ids
  int32_t limit_ids_per_partition = 0;         // 0: no limit
  int32_t limit_unique_ids_per_partition = 0;  // 0: no limit
};
struct BatchStatistics {
  std::vector<StackStatistics> stacks;
  int32_t num_minibatches = 0;
};

// Movable; copies share the memory behind the spans, which goes with the last of them.
struct LookupResult {
  BatchHandle batch;
  std::vector<Activation> activations;  // in the order of the request
  BatchStatistics statistics;
  std::shared_ptr<const void> memory;  // behind the spans above

  // Null if the request had no such feature.
  const Activation* Find(std::string_view feature) const;
};

// The gradients of one feature's activations, row-major [samples, embedding_dim] as in the
// LookupResult of this batch.
struct FeatureGradient {
  std::string_view feature;
  absl::Span<const float> values;  // from the first row to the end of the last
  int64_t samples = 0;
  int64_t row_stride = 0;  // floats from one row to the next; 0: embedding_dim
};

// New values of hyper-parameters for one step, by their names in OptimizerConfig:
// {{"learning_rate", 0.01}}. The same value has the same effect as in the config.
struct StepHyperparameters {
  std::string table;  // empty: every table; those of one stack need the same value
  std::map<std::string, double> values;
};

struct ApplyOptions {
  std::vector<StepHyperparameters> hyperparameters;
  int64_t step = -1;  // 0-based number of the step; -1: not given. Needed by Adam with bias
                      // correction, AdamW, LaProp, F2A
  // Identity of this update, from Client::NextSequence; 0: a new one. To repeat a call whose
  // outcome is unknown (it ended with UNAVAILABLE, DEADLINE_EXCEEDED or CANCELLED), pass the number
  // of the first try: it is applied once. With the number of an update whose batch is gone
  // (NOT_FOUND), pass the batch of a new lookup.
  uint64_t sequence = 0;
  absl::Duration deadline = absl::ZeroDuration();  // zero: the client's
};
struct ApplyResult {
  int64_t rows_updated = 0;
  bool replayed = false;     // true: this update had been applied before; nothing was done now
  int64_t rows_skipped = 0;  // left as they were: their gradient was not finite
};

// ---- Of a step on a stream (train_stream.h)

// Where the time of a request went, on the coordinator.
struct StepTimes {
  absl::Duration preprocess;
  absl::Duration wait_for_ranks;
  absl::Duration wait_for_update;  // lookup: for the update that it has to see; update: for the
                                   // lookup that must not see it
  absl::Duration shards;           // lookup: gather; update: stage and commit
  absl::Duration combine;
  int slowest_rank = -1;  // -1: there was no waiting for ranks
};

// Movable; copies share the memory behind the spans. It may outlive the stream; if it is
// destroyed early, its memory is used for a later step.
struct TrainLookupResult {
  int64_t step = 0;
  std::vector<Activation> activations;  // in the order of the request
  absl::Span<const float> concat = {};  // of all features side by side, if that was asked for
  BatchStatistics statistics;           // of this rank; num_minibatches is common to all
  StepTimes times;
  std::shared_ptr<const void> memory;
};

struct TrainUpdateResult {
  int64_t step = 0;
  int64_t rows_updated = 0;  // distinct rows, over all ranks
  StepTimes times;
  int64_t rows_skipped = 0;  // left as they were: their gradient was not finite
  // The name of a checkpoint that this stream has asked for, if its outcome has become known, and
  // why it could not be saved; empty: it has been.
  std::string checkpoint = {};
  std::string checkpoint_error = {};
  // The step that asked for it: several may use one name. -1: the coordinator is older and does not
  // say it.
  int64_t checkpoint_step = -1;
};

struct TrainLookupOptions {
  // The activations of all features, which have the same number of samples, are received side by
  // side: [samples, sum of embedding_dim], in the order of the request.
  bool concat = false;
};

struct UpdateOptions {
  // Of this step; every rank of a kSync group gives the same.
  std::vector<StepHyperparameters> hyperparameters = {};
  // Keeps the memory behind float32 gradients alive, which are then sent without a copy: it must
  // not change until only the caller has a reference to `memory`, which is so when the update's
  // answer has come. Null: they are copied before SendUpdate returns.
  std::shared_ptr<const void> memory = {};
  // Saves a checkpoint of this name that holds exactly the steps up to this one, of all ranks; any
  // one rank asks. It is written while training goes on: this or a later TrainUpdateResult has its
  // outcome.
  std::string checkpoint = {};
  // The step is counted, but no row changes, and no gradients are given: for a step that is
  // abandoned after its lookup. Every rank of a kSync group does the same.
  bool skip = false;
};

// ---- Of single rows

// Rows of a table or of one of its slots, row-major [ids, dim], in the order of the ids.
struct RowValues {
  int64_t dim = 0;  // embedding_dim; 1 for a slot with one value per row
  std::vector<float> values;
};

struct AssignOptions {
  std::string slot;       // empty: the weights
  uint64_t sequence = 0;  // as in ApplyOptions
  absl::Duration deadline = absl::ZeroDuration();
};

struct ExportOptions {
  std::string slot;                             // empty: the weights
  int64_t first_row = 0;                        // at most vocabulary_size
  int64_t row_count = 0;                        // 0: to the end; not beyond it
  absl::Duration deadline = absl::Minutes(30);  // of the whole export
};

}  // namespace emberd::client
