// What goes into the engine and comes out of it: models, gradients, rows, results.
// See docs/words.md.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "config/optimizers.h"
#include "emberd/v1/model.pb.h"

namespace emberd::shard {

class LaterSums;
class MemoryManager;

struct EngineOptions {
  CpuPool* cpu = nullptr;  // required; must outlive the engine
  // Bytes of weights and slots that one partition may hold over all models; checked before memory
  // is taken.
  int64_t bytes_per_partition = int64_t{16} << 30;
  // Stacks of at most this many bytes on this shard get all their rows when the model is created;
  // larger ones row by row when first touched. The bits are the same.
  int64_t eager_bytes = int64_t{64} << 20;
  // Arrays of at most this many bytes are backed by huge pages: up to twice as fast, but a first
  // touch takes 2 MiB.
  int64_t huge_page_bytes = int64_t{8} << 30;
  // Buffers that are kept for the next requests, in all.
  int64_t idle_buffer_bytes = int64_t{1} << 30;
  // Instead of bytes_per_partition, for models that may be evicted; null: they stay.
  std::shared_ptr<MemoryManager> memory = nullptr;
};

// --- Models: what a shard must know of one: its stacks, and how their rows begin and learn.

// Rows [row_offset, row_offset + padded rows / P) of every partition belong to this table.
// Logical id e: partition (e + shard_rotation) mod P, local row e div P + row_offset.
struct TableSpec {
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t padded_vocabulary_size = 0;
  int embedding_dim = 0;  // columns beyond it are padding: always 0
  int64_t row_offset = 0;
  int shard_rotation = 0;
  v1::InitializerConfig initializer;
  std::string seed_name;  // with the seed, key of the initial values; empty: the name

  const std::string& SeedName() const { return seed_name.empty() ? name : seed_name; }
};

struct StackSpec {
  std::string name;
  int embedding_dim = 0;  // padded width
  int64_t rows_per_partition = 0;
  std::vector<TableSpec> tables;
  v1::OptimizerConfig optimizer;  // complete: every field present
  v1::DataType storage_dtype = v1::FLOAT32;
  bool stochastic_rounding = false;  // of 16-bit weights, in updates
  bool skip_nonfinite = false;       // rows with a sum that is not finite; else it is refused
  v1::ResultMode result_mode = v1::PARTIAL_SUMS;
  bool quantized = false;
  v1::QuantizationConfig quantization;
  // Not empty: every model with a stack of this resource has the same rows, see SharedStacks. It
  // has one table, which fills it and is not rotated; names of both differ from model to model.
  std::string resource;
};

// Bytes of the weights of one row.
inline int64_t RowBytes(const StackSpec& stack) {
  return stack.embedding_dim * config::WeightBytes(stack.storage_dtype);
}

// Whether rows of the stack can be returned as bfloat16 instead of as they are stored, and what one
// has then.
inline bool MayRound(const StackSpec& stack) {
  return stack.storage_dtype == v1::FLOAT32 && !stack.quantized;
}
inline int64_t RoundedRowBytes(const StackSpec& stack) {
  return stack.embedding_dim * config::WeightBytes(v1::BFLOAT16);
}

struct ModelSpec {
  uint64_t model_id = 0;
  std::string name;
  uint64_t seed = 0;
  int partitions = 1;       // P, of the whole cluster
  int first_partition = 0;  // this shard owns [first_partition, first_partition + partition_count)
  int partition_count = 1;  // K, a power of two
  std::vector<StackSpec> stacks;
};

// --- Memory of the caller's, which the engine reads and writes in place.

// Where the rows of one feature's samples lie.
template <typename Value>
struct FeatureRows {
  Value* first = nullptr;    // the row of the feature's first sample; null: there are none
  int64_t width = 0;         // values of a row: as many as the stack is wide
  int64_t stride = 0;        // values from one row to the next
  int64_t first_sample = 0;  // the canonical number of the first sample
  int64_t samples = 0;

  // `sample`: a canonical number of this feature's.
  Value* operator()(int64_t sample) const { return first + (sample - first_sample) * stride; }
};

// Where a gather writes the sums of one stack.
struct SumPlaces {
  int stack = 0;
  std::vector<FeatureRows<float>> features;  // all of the stack's, in canonical order
  // Sums of these samples are returned instead: bit s % 32 of word s / 32 stands for canonical
  // sample s. Empty: none.
  std::vector<uint32_t> passed_over;

  bool PassesOver(int64_t sample) const {
    return !passed_over.empty() && (passed_over[sample / 32] >> (sample % 32) & 1) != 0;
  }
  int64_t CountPassedOver() const {
    return std::accumulate(passed_over.begin(), passed_over.end(), int64_t{0},
                           [](int64_t sum, uint32_t word) { return sum + std::popcount(word); });
  }
};
struct GatherPlaces {
  std::vector<SumPlaces> stacks;      // those of other stacks are returned
  absl::Span<char> room;              // where what is returned may lie; from a multiple of 64 on
  std::shared_ptr<const void> owner;  // keeps all of it alive

  const SumPlaces* Find(int stack) const {
    for (const SumPlaces& places : stacks) {
      if (places.stack == stack) return &places;
    }
    return nullptr;
  }
};

// --- What a gather returns.

// Partial sums of one stack over this shard's partitions.
struct StackSums {
  int stack = 0;
  absl::Span<const int32_t> samples;  // canonical samples with at least one entry here, ascending
  absl::Span<const float> sums;       // [rows, padded width], in the order of `samples`
  int64_t rows_gathered = 0;          // entries of the batch
  int64_t rows = 0;
  // Sums were written to their SumPlaces; those of the samples that these pass over follow. False:
  // all follow.
  bool placed = false;
  // Not null: makes the sums, which do not follow.
  std::shared_ptr<const LaterSums> later = nullptr;
  std::shared_ptr<const void> owner = nullptr;  // keeps the spans alive; null: the caller does

  int64_t bytes() const {
    return static_cast<int64_t>(samples.size() * sizeof(int32_t) + sums.size() * sizeof(float));
  }
};

// The distinct rows of one stack that a batch names on this shard, as they are stored: partition by
// partition, local rows ascending. Whoever has the batch makes the same partial sums of them
// (LaterSums).
struct StackRows {
  int stack = 0;
  int64_t row_bytes = 0;
  absl::Span<const char> rows;                  // of row_bytes each
  int64_t rows_gathered = 0;                    // entries of the batch
  bool rounded = false;                         // they are +0 + row, rounded to bfloat16
  std::shared_ptr<const void> owner = nullptr;  // as in StackSums

  int64_t bytes() const { return static_cast<int64_t>(rows.size()); }
};

// Every stack of the batch stands in one of the two, each in the order of the batch.
struct GatherOutput {
  std::vector<StackSums> sums;
  std::vector<StackRows> rows;
};

// --- What an update takes and returns.

// Overrides of one step by OptimizerConfig field name, e.g. "learning_rate".
using Hyperparameters = absl::flat_hash_map<std::string, double>;

// Gradients of one stack: one row for each sample that has an entry here, ascending (those that
// StackSums names).
struct StackGradients {
  int stack = 0;
  // [samples, width]; empty: every gradient is zero (rows are updated all the same). Padding
  // columns are zero.
  absl::Span<const float> gradients;
  Hyperparameters hyperparameters;
  // Instead of `gradients`: where they lie, for all features of the stack, in canonical order.
  // Whoever gives them has checked that they are finite; a value that has changed since and is no
  // longer finite counts as 0.
  std::vector<FeatureRows<const float>> features = {};
  // `gradients` has a row for each distinct row instead, in the order of StackRows: the sum that an
  // update makes of its samples' gradients. Only for a batch that returned these rows, and for the
  // only rank of its step. Whoever gives them has checked the gradients. A sum of finite gradients
  // may be infinite; it counts as it would if the update had made it.
  bool of_rows = false;
};

struct ApplyInput {
  std::vector<StackGradients>
      stacks;             // at most one per stack of the batch; a missing one counts as all zero
  int64_t step = -1;      // 0-based; -1: not given
  uint64_t rng_seed = 0;  // StackStore::NextRoundingKey
  bool skip = false;      // no row changes; there are no gradients
  // The gradients come from a log, and were checked before they were written there. Some may be
  // sums (StackGradients.of_rows), which need not be finite.
  bool checked = false;
  std::shared_ptr<const void> owner;  // keeps the gradients alive until done
};

struct ApplyResult {
  int64_t rows_updated = 0;  // distinct rows of all stacks
  int64_t rows_skipped = 0;  // left as they were: StackSpec::skip_nonfinite
  // The same of each stack that the batches have.
  struct Stack {
    int stack = 0;
    int64_t rows_updated = 0;
    int64_t rows_skipped = 0;
  };
  std::vector<Stack> stacks;
};

// --- Single rows.

// `slot` empty: weights. The leading `columns` columns of each row. `partitions` are global
// numbers.
struct RowSelection {
  uint64_t model_id = 0;
  int stack = 0;
  std::string slot;
  absl::Span<const int32_t> partitions;
  absl::Span<const int64_t> local_rows;
  int columns = 0;
  uint64_t history = 0;  // of the rows, for who keeps several: the engine does not look at it
};

// --- Figures.

// What one partition holds, and has done since the start.
struct PartitionStatistics {
  int64_t table_bytes = 0;
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
};
struct EngineStatistics {
  int models = 0;
  int64_t table_bytes = 0;  // reserved for weights and slots; what models share counts once
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
  int queued = 0;  // pieces of work that could run but wait for a thread
  // As many as the models have on this shard; none without a model.
  std::vector<PartitionStatistics> partitions;
};

// The rows of a table that gathers read most, as estimated from a sample (HotRowSketches):
// `lookups` is too high by at most `error`, but for the sampling.
struct HotRow {
  int64_t id = 0;  // the table's own
  int64_t lookups = 0;
  int64_t error = 0;
};
struct HotTable {
  std::string model;
  std::string table;
  int64_t lookups = 0;       // of all rows on this shard
  std::vector<HotRow> rows;  // most lookups first
};

}  // namespace emberd::shard
