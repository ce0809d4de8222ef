// How the tables of a model are stacked and placed over the partitions of a cluster, and where a
// row of a table lies. Pure data, made once per model.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/plan.pb.h"

namespace emberd::preprocess {

// ---- Where a row of a table lies: partition and local row; and the rounding that the layout rests
// on. Formulas are those of TensorFlow's and JAX's mod sharding with rotation.

// Rows of a table in one partition and columns of a row are multiples of this many.
inline constexpr int64_t kTableAlignment = 8;

// The smallest multiple of `multiple` that is >= value; value >= 0.
constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr int64_t PaddedWidth(int64_t embedding_dim) {
  return RoundUp(embedding_dim, kTableAlignment);
}

// So many rows that each of the partitions holds the same number, a multiple of 8.
constexpr int64_t PaddedRows(int64_t vocabulary_size, int64_t partitions) {
  return RoundUp(vocabulary_size, kTableAlignment * partitions);
}

constexpr bool IsPowerOfTwo(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Bits that hold the values 0 to count - 1; 0 for a count of 0 or 1.
constexpr int BitsFor(uint64_t count) {
  return count == 0 ? 0 : static_cast<int>(std::bit_width(count - 1));
}

// A table inside a stack of P partitions. P need not be a power of two here.
struct RowPlacement {
  int64_t partitions = 1;
  int64_t rotation = 0;    // in [0, P)
  int64_t row_offset = 0;  // first local row of the table in every partition

  int64_t Partition(int64_t id) const { return (id + rotation) % partitions; }
  int64_t LocalRow(int64_t id) const { return id / partitions + row_offset; }
};

// The rotation of a plan that names none: the odd number nearest to 0.618 * P, mod P. Neighbours in
// a stack land far from each other, an odd step visits every partition, and the value depends on P
// alone.
constexpr int DefaultRotation(int partitions) {
  const double golden = 0.6180339887498949 * partitions;
  int best = 1;
  for (int odd = 1; odd <= partitions + 1; odd += 2) {
    const double distance = odd > golden ? odd - golden : golden - odd;
    const double best_distance = best > golden ? best - golden : golden - best;
    if (distance < best_distance) best = odd;
  }
  return best % partitions;
}

// ---- Which tables share a stack: the automatic rules of jax-tpu-embedding (auto_stack_tables) and
// of TensorFlow (SparseCoreLayoutStacker), and the names of stacks.

// What the rules look at.
struct StackCandidate {
  std::string name;
  std::string group;        // only tables of equal group may share a stack
  int64_t width = 0;        // padded columns
  int64_t padded_rows = 0;  // over all partitions
  // Samples that one SparseCore looks up in this table: JAX sums feature by feature after the
  // division, TensorFlow divides the sum.
  int64_t samples_per_sparsecore = 0;
};

// 0 switches a limit off.
struct StackingLimits {
  int64_t activation_bytes = int64_t{2} << 20;  // per SparseCore
  int64_t shard_bytes = int64_t{2} << 30;       // float32 weights per shard
  int64_t shards = 1;
  int64_t rows = std::numeric_limits<int32_t>::max();
  int64_t tables = std::numeric_limits<int32_t>::max();
};

// Both return stacks of indices into `tables`; stacks in order of their first table.
// JAX: tables in the order given; a table joins the first stack of its group with activations <=
// limit. JAX does not limit the rows of a stack; here it has fewer than 2^31 - 1.
std::vector<std::vector<int>> StackLikeJax(absl::Span<const StackCandidate> tables,
                                           const StackingLimits& limits);
// TensorFlow: tables in the order given (its callers sort them by name); a table joins the first
// stack of its width and group whose activations, weights, rows and tables all stay strictly below
// the limits.
std::vector<std::vector<int>> StackLikeTensorFlow(absl::Span<const StackCandidate> tables,
                                                  const StackingLimits& limits);

// Table names joined by "_". A short name longer than 50 characters becomes its first 50
// characters, "..." and the first 12 hex digits of its SHA-256.
std::string StackName(absl::Span<const std::string> table_names, bool shorten);

// The part of a cluster that placement depends on. Both numbers are powers of two.
struct Topology {
  int shards = 1;
  int sparsecores_per_shard = 1;
  bool assumed = false;  // nobody gave sparsecores_per_shard
  int partitions() const { return shards * sparsecores_per_shard; }
};

// A table inside its stack. Id e lives in partition (e + shard_rotation) mod P at local row e div P
// + row_offset.
struct TablePlan {
  int table = 0;  // index in ModelConfig.tables
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t padded_vocabulary_size = 0;  // multiple of 8 * P
  int embedding_dim = 0;
  int64_t row_offset = 0;  // first local row in every partition
  int shard_rotation = 0;  // in [0, P)
};

// A feature inside its stack.
struct FeaturePlan {
  int feature = 0;  // index in ModelConfig.features
  std::string name;
  int table_in_stack = 0;            // index in StackPlan.tables
  v1::Combiner combiner = v1::MEAN;  // of the table that the feature names
  int64_t batch_size = 0;            // planned samples, as FeatureConfig has them
  int64_t row_offset = 0;            // first sample of the feature, for planned batch sizes
  int64_t col_offset = 0;            // row_offset of the table * P
  int col_shift = 0;                 // shard_rotation of the table
};

// What a batch may need of a stack; 0: no limit.
struct PartitionLimits {
  // Of one (source slot, partition) pair in one mini-batch.
  int64_t ids = 0;
  int64_t unique = 0;
  // Of the batch, as PlanConfig has them: max_ids_per_chip_per_sample and
  // max_minibatches_per_sparsecore.
  int64_t ids_per_sample = 0;
  int64_t minibatches = 0;

  bool Exceeded(int64_t ids_there, int64_t unique_there) const {
    return (ids > 0 && ids_there > ids) || (unique > 0 && unique_there > unique);
  }
};

// To a message of the API that has all four.
template <typename Message>
void WriteLimits(const PartitionLimits& limits, Message* out) {
  out->set_max_ids_per_partition(static_cast<int32_t>(limits.ids));
  out->set_max_unique_ids_per_partition(static_cast<int32_t>(limits.unique));
  out->set_max_ids_per_chip_per_sample(static_cast<int32_t>(limits.ids_per_sample));
  out->set_max_minibatches_per_sparsecore(static_cast<int32_t>(limits.minibatches));
}

// With the rules of TensorFlow, and of programs, if nothing else is said.
inline constexpr int kDefaultIdsPerSample = 64;
inline constexpr int kDefaultMinibatches = 64;

// Tables of equal padded width, optimizer, quantization, storage type and result mode, concatenated
// row-wise. A table with a resource is a stack of its own: its rows lie at the same places in every
// model. All tables of the resource are this one, named as the first of them.
struct StackPlan {
  std::string name;
  int embedding_dim = 0;              // padded width, multiple of 8
  int64_t rows_per_partition = 0;     // multiple of 8
  std::vector<TablePlan> tables;      // in stack order
  std::vector<FeaturePlan> features;  // in canonical order (ascending row_offset)
  // The tightest of the tables, so that each table's own holds, and the capacity of the model.
  PartitionLimits limits;
  int64_t samples = 0;  // of all features, as planned
};

struct Plan {
  Topology topology;
  std::vector<StackPlan> stacks;
  // Where feature i of the config stands:
  // stacks[feature_at[i].stack].features[feature_at[i].position].
  struct FeatureLocation {
    int stack = 0;
    int position = 0;
  };
  std::vector<FeatureLocation> feature_at;
  // The same for tables: stacks[...].tables[position].
  std::vector<FeatureLocation> table_at;
  // First 64 bits of a SHA-256 over everything that processes must agree on: the topology and every
  // stack, table and feature. The same in every process and on every machine, never 0.
  uint64_t fingerprint = 0;
};

// Plans a model whose config has been checked and completed by config::CompleteModel.
// INVALID_ARGUMENT names the offending field (for instance a group of tables with different
// optimizers, or a stack of more than MaxRowsPerPartition rows).
absl::StatusOr<Plan> MakePlan(const v1::ModelConfig& model, const Topology& topology);

// The plan as the API shows it, with estimates and warnings.
v1::ModelPlan PlanToProto(const v1::ModelConfig& model, const Plan& plan);

}  // namespace emberd::preprocess
