// An engine with one model, driven synchronously.
#pragma once

#include <cstdlib>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/status.h"
#include "base/testing/seed.h"
#include "shard/engine.h"
#include "shard/testing/test_batch.h"

namespace emberd::shard {

inline absl::StatusOr<std::shared_ptr<Snapshot>> BeginSnapshot(Engine& engine, uint64_t model_id,
                                                               const SnapshotOptions& options) {
  ASSIGN_OR_RETURN(auto snapshot, engine.MakeSnapshot({model_id}, options));
  engine.StartSnapshot(*snapshot);
  return snapshot;
}

namespace testing {

// A stack of one table that fills it, `columns` of `width` live.
inline StackSpec OneTableStack(const TestShape& shape, int width, int columns,
                               const v1::OptimizerConfig& optimizer) {
  StackSpec stack;
  stack.name = "stack";
  stack.embedding_dim = width;
  stack.rows_per_partition = shape.rows_per_partition;
  stack.optimizer = optimizer;
  TableSpec& table = stack.tables.emplace_back();
  table.name = "table";
  table.vocabulary_size = table.padded_vocabulary_size =
      shape.rows_per_partition * shape.partitions;
  table.embedding_dim = columns;
  table.initializer.mutable_uniform()->set_lower(-1);
  table.initializer.mutable_uniform()->set_upper(1);
  return stack;
}

// What one rank brings to a step, unchecked.
struct RankInput {
  std::shared_ptr<const Batch> batch;
  ApplyInput input;
};

inline absl::Status Check(const std::shared_ptr<const Batch>& batch, const ApplyInput& input) {
  return CheckedPart::Make(batch, input).status();
}
// Parts by rank.
inline absl::StatusOr<StagedUpdate> Stage(const std::vector<RankInput>& parts) {
  StagedUpdate update(static_cast<int>(parts.size()));
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    ASSIGN_OR_RETURN(auto part, CheckedPart::Make(parts[rank].batch, parts[rank].input));
    RETURN_IF_ERROR(update.Add(static_cast<int>(rank), std::move(part)));
  }
  return update;
}

class TestEngine {
 public:
  // Partitions [first, first + count) of shape.partitions.
  TestEngine(std::vector<StackSpec> stacks, const TestShape& shape, int first, int count,
             EngineOptions options = {}, int threads = 2)
      : TestEngine(MakeSpec(std::move(stacks), shape, first, count), options, threads) {}
  explicit TestEngine(ModelSpec spec, EngineOptions options = {}, int threads = 2)
      : spec_(std::move(spec)), cpu_(threads) {
    options.cpu = &cpu_;
    engine_ = *Engine::Create(options);
    const absl::Status status = engine_->CreateModel(spec_);
    EXPECT_TRUE(status.ok()) << status;
  }

  Engine& engine() { return *engine_; }
  const ModelSpec& spec() const { return spec_; }

  absl::StatusOr<std::shared_ptr<const Batch>> Prepare(
      const preprocess::StackBatchView& view, v1::DataType activation_dtype = v1::FLOAT32) {
    return engine_->PrepareBatch(spec_.model_id, {view}, nullptr, {}, activation_dtype);
  }

  GatherOutput GatherEither(std::shared_ptr<const Batch> batch) {
    GatherOutput result;
    std::promise<void> done;
    engine_->Gather(std::move(batch), {}, [&](absl::StatusOr<GatherOutput> output) {
      EXPECT_TRUE(output.ok()) << output.status();
      if (output.ok()) result = *std::move(output);
      done.set_value();
    });
    done.get_future().wait();
    return result;
  }
  // For models whose stacks all return partial sums.
  std::vector<StackSums> Gather(std::shared_ptr<const Batch> batch) {
    GatherOutput output = GatherEither(std::move(batch));
    EXPECT_TRUE(output.rows.empty());
    return std::move(output.sums);
  }

  // Rows updated.
  int64_t Apply(std::shared_ptr<const Batch> batch, ApplyInput input) {
    return ApplyParts({{std::move(batch), std::move(input)}});
  }
  int64_t ApplyParts(std::vector<RankInput> parts) {
    return ApplyForResult(std::move(parts)).rows_updated;
  }
  ApplyResult ApplyForResult(std::vector<RankInput> parts) {
    absl::StatusOr<StagedUpdate> update = Stage(parts);
    EXPECT_TRUE(update.ok()) << update.status();
    if (!update.ok()) return {};
    ApplyResult result;
    std::promise<void> done;
    engine_->Apply(*std::move(update), [&](absl::StatusOr<ApplyResult> updated) {
      EXPECT_TRUE(updated.ok()) << updated.status();
      if (updated.ok()) result = *std::move(updated);
      done.set_value();
    });
    done.get_future().wait();
    return result;
  }

  absl::Status Read(const RowSelection& rows, absl::Span<float> values) {
    absl::Status result;
    std::promise<void> done;
    engine_->ReadRows(rows, values, [&](absl::Status status) {
      result = status;
      done.set_value();
    });
    done.get_future().wait();
    return result;
  }

  absl::Status Assign(const RowSelection& rows, absl::Span<const float> values) {
    absl::StatusOr<std::shared_ptr<const Engine::StagedAssign>> assign =
        engine_->StageAssign(rows, values, nullptr);
    if (!assign.ok()) return assign.status();
    std::promise<absl::Status> done;
    engine_->Assign(*std::move(assign),
                    [&](const absl::Status& status) { done.set_value(status); });
    return done.get_future().get();
  }

  // `columns` values of one row of the weights or a slot; `partition` is global.
  std::vector<float> ReadRow(int stack, int partition, int64_t local_row, int columns,
                             const std::string& slot = "") {
    const std::vector<int32_t> partitions = {partition};
    const std::vector<int64_t> rows = {local_row};
    std::vector<float> values(columns);
    const absl::Status status =
        Read({spec_.model_id, stack, slot, partitions, rows, columns}, absl::MakeSpan(values));
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

 private:
  static ModelSpec MakeSpec(std::vector<StackSpec> stacks, const TestShape& shape, int first,
                            int count) {
    ModelSpec spec;
    spec.model_id = 7;
    spec.name = "model";
    spec.seed = 1;
    spec.partitions = shape.partitions;
    spec.first_partition = first;
    spec.partition_count = count;
    spec.stacks = std::move(stacks);
    return spec;
  }

  ModelSpec spec_;
  CpuPool cpu_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace testing
}  // namespace emberd::shard
