// The emulated SparseCores of one shard process: rows and optimizer slots of its partitions, gather
// and apply. Knows nothing of gRPC, of other shards, or of who is asking.
//
// Threads: the engine owns a fixed pool. Rows of a partition are changed by one thread at a time,
// in the order in which work was submitted; neighbouring reads share a partition, everything else
// runs in parallel. All public methods may be called from any thread and do not block on other
// requests' work; callbacks run on a pool thread and must be short.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "preprocess/batch/csr.h"
#include "shard/store/model_spec.h"

namespace emberd::shard {

struct EngineOptions {
  int threads = 0;  // 0: number of CPUs
  // Bytes of weights and slots that one partition may hold over all models; checked before memory
  // is taken.
  int64_t bytes_per_partition = int64_t{16} << 30;
  // Stacks of at most this many bytes on this shard get all their rows when the model is created;
  // larger ones row by row when first touched. The bits are the same.
  int64_t eager_bytes = int64_t{64} << 20;
  // Arrays of at most this many bytes are backed by huge pages: up to twice as fast, but a first
  // touch takes 2 MiB.
  int64_t huge_page_bytes = int64_t{8} << 30;
};

// A buffer, 64-byte aligned, that returns to the engine's pool when the last reference goes. Sizes
// count elements.
template <typename T>
class ResultBuffer {
 public:
  virtual ~ResultBuffer() = default;
  virtual T* data() = 0;
  virtual const T* data() const = 0;
  virtual int64_t size() const = 0;
};
using FloatBuffer = ResultBuffer<float>;
using ByteBuffer = ResultBuffer<char>;

// A batch that has been checked against the model and arranged for gather and apply. Immutable,
// thread-safe.
class Batch;

// Partial sums of one stack over this shard's partitions.
struct StackSums {
  int stack = 0;
  int width = 0;                 // floats of a row
  std::vector<int32_t> samples;  // canonical samples with at least one entry here, ascending
  std::shared_ptr<const FloatBuffer> sums;  // [samples.size(), width]
  int64_t rows_gathered = 0;                // entries of the batch
};

// The distinct rows of one stack that a batch names on this shard, as they are stored: partition by
// partition, local rows ascending. Whoever has the batch makes the same partial sums of them
// (row_pooler.h).
struct StackRows {
  int stack = 0;
  int64_t row_bytes = 0;
  int64_t count = 0;
  std::shared_ptr<const ByteBuffer> rows;  // [count, row_bytes]
  int64_t rows_gathered = 0;               // entries of the batch
};

// Every stack of the batch stands in one of the two, each in the order of the batch.
struct GatherOutput {
  std::vector<StackSums> sums;
  std::vector<StackRows> rows;
};

// Gradients of one stack: one row for each sample that has an entry here, ascending (those that
// StackSums names).
struct StackGradients {
  int stack = 0;
  // [samples, width]; empty: every gradient is zero (rows are updated all the same). Padding
  // columns are zero.
  absl::Span<const float> gradients;
  // Overrides of this step by OptimizerConfig field name, e.g. "learning_rate".
  absl::flat_hash_map<std::string, double> hyperparameters;
};

struct ApplyInput {
  std::vector<StackGradients>
      stacks;         // at most one per stack of the batch; a missing one counts as all zero
  int64_t step = -1;  // 0-based; -1: not given
  std::shared_ptr<const void> owner;  // keeps `gradients` alive until done
};

// What one rank of a synchronous group contributes to a step.
struct ApplyPart {
  std::shared_ptr<const Batch> batch;
  ApplyInput input;
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

// What one partition holds, and has done since the start.
struct PartitionStatistics {
  int64_t table_bytes = 0;
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
};
struct EngineStatistics {
  int models = 0;
  int64_t table_bytes = 0;  // reserved for weights and slots
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
  int queued = 0;  // pieces of work that could run but wait for a thread
  // As many as the models have on this shard; none without a model.
  std::vector<PartitionStatistics> partitions;
};

// The rows of a table that gathers read most, as estimated from a sample (hot_rows.h): `lookups` is
// too high by at most `error`, but for the sampling.
struct HotRow {
  int64_t id = 0;  // the table's own
  int64_t lookups = 0;
  int64_t error = 0;
};
struct HotTable {
  std::string model;
  std::string table;
  int64_t lookups = 0;       // of all rows on this shard
  std::vector<HotRow> rows;  // most look-ups first
};

class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options);
  // Waits for work in progress.
  virtual ~Engine() = default;

  // Reserves and initialises. RESOURCE_EXHAUSTED names the bytes needed and the budget.
  // ALREADY_EXISTS if the id is known.
  virtual absl::Status CreateModel(const ModelSpec& spec) = 0;
  virtual absl::Status DropModel(uint64_t model_id) = 0;

  // Checks `stacks` (from the wire: trust nothing) and arranges them. `owner` keeps their memory
  // alive and is held by the batch only as long as it is needed.
  virtual absl::StatusOr<std::shared_ptr<const Batch>> PrepareBatch(
      uint64_t model_id, std::vector<preprocess::StackBatchView> stacks,
      std::shared_ptr<const void> owner) = 0;
  // Bytes that a batch holds.
  virtual int64_t BatchBytes(const Batch& batch) const = 0;

  // For every sample s and partition p: the sum over the entries of (s, p), in ascending local row,
  // of gain * row, starting from +0; then over the shard's partitions by a balanced binary tree in
  // partition order. Or the rows themselves: StackSpec.result_mode chooses.
  using GatherCallback = std::function<void(absl::StatusOr<GatherOutput>)>;
  virtual void Gather(std::shared_ptr<const Batch> batch, GatherCallback done) = 0;

  // Checks an ApplyInput against its batch without changing anything: shapes, finite values unless
  // the stack skips them, hyper-parameter names and ranges, step where the optimizer needs it.
  virtual absl::Status CheckApply(const Batch& batch, const ApplyInput& input) const = 0;
  // For every row of the batch, once: g = sum of gain * gradient[sample] in canonical sample order,
  // then the optimizer's update. `input` has passed CheckApply.
  using ApplyCallback = std::function<void(absl::StatusOr<ApplyResult>)>;
  virtual void Apply(std::shared_ptr<const Batch> batch, ApplyInput input, ApplyCallback done) = 0;

  // The same for a step of several ranks, whose parts are given in rank order: one update per row
  // that any of them touches. The tables get the bits that one Apply would give them of the
  // concatenated batch: for each feature the samples of rank 0, then those of rank 1, and so on. A
  // rank may lack a stack; one that gives no gradients of a stack gives zeros, and has no say in
  // its hyper-parameters.
  //
  // Checks that parts, each of which has passed CheckApply, agree on model, features, step and
  // hyper-parameters: INVALID_ARGUMENT names rank, stack, field and both values.
  virtual absl::Status CheckApplyParts(absl::Span<const ApplyPart> parts) const = 0;
  // `parts` have passed CheckApply and CheckApplyParts.
  virtual void ApplyParts(std::vector<ApplyPart> parts, ApplyCallback done) = 0;

  // Rows in the order asked for. `slot` empty: weights. `columns` leading columns of each row go to
  // (come from) values[n * columns]. `partitions` are global numbers. Each row is read or written
  // as a whole.
  using DoneCallback = std::function<void(absl::Status)>;
  struct RowSelection {
    uint64_t model_id = 0;
    int stack = 0;
    std::string slot;
    absl::Span<const int32_t> partitions;
    absl::Span<const int64_t> local_rows;
    int columns = 0;
  };
  virtual void ReadRows(const RowSelection& rows, absl::Span<float> values, DoneCallback done) = 0;
  virtual void AssignRows(const RowSelection& rows, absl::Span<const float> values,
                          DoneCallback done) = 0;

  virtual EngineStatistics Statistics() const = 0;
  // At most `count` rows of every table, by model and table.
  virtual std::vector<HotTable> HotRows(int count) const = 0;
};

}  // namespace emberd::shard
