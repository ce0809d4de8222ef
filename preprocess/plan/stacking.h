// Which tables share a stack: the automatic rules of jax-tpu-embedding (auto_stack_tables) and of
// TensorFlow (SparseCoreLayoutStacker), and the names of stacks.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace emberd::preprocess {

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
// limit.
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

}  // namespace emberd::preprocess
