// An engine with one model, driven synchronously.
#pragma once

#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "shard/engine.h"
#include "shard/testing/test_batch.h"

namespace emberd::shard::testing {

// From EMBERD_TEST_SEED, or new; printed so that a failure can be repeated.
inline uint64_t TestSeed() {
  const char* text = std::getenv("EMBERD_TEST_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  printf("EMBERD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

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

class TestEngine {
 public:
  // Partitions [first, first + count) of shape.partitions.
  TestEngine(std::vector<StackSpec> stacks, const TestShape& shape, int first, int count,
             EngineOptions options = {})
      : TestEngine(MakeSpec(std::move(stacks), shape, first, count), options) {}
  explicit TestEngine(ModelSpec spec, EngineOptions options = {}) : spec_(std::move(spec)) {
    engine_ = *Engine::Create(options);
    const absl::Status status = engine_->CreateModel(spec_);
    EXPECT_TRUE(status.ok()) << status;
  }

  Engine& engine() { return *engine_; }
  const ModelSpec& spec() const { return spec_; }

  absl::StatusOr<std::shared_ptr<const Batch>> Prepare(const preprocess::StackBatchView& view) {
    return engine_->PrepareBatch(spec_.model_id, {view}, nullptr);
  }

  GatherOutput GatherEither(std::shared_ptr<const Batch> batch) {
    GatherOutput result;
    std::promise<void> done;
    engine_->Gather(std::move(batch), [&](absl::StatusOr<GatherOutput> output) {
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
    const absl::Status check = engine_->CheckApply(*batch, input);
    EXPECT_TRUE(check.ok()) << check;
    return Wait([&](Engine::ApplyCallback done) {
      engine_->Apply(std::move(batch), std::move(input), std::move(done));
    });
  }
  int64_t ApplyParts(std::vector<ApplyPart> parts) {
    for (const ApplyPart& part : parts) {
      const absl::Status check = engine_->CheckApply(*part.batch, part.input);
      EXPECT_TRUE(check.ok()) << check;
    }
    const absl::Status check = engine_->CheckApplyParts(parts);
    EXPECT_TRUE(check.ok()) << check;
    return Wait([&](Engine::ApplyCallback done) {
      engine_->ApplyParts(std::move(parts), std::move(done));
    });
  }

  absl::Status Read(const Engine::RowSelection& rows, absl::Span<float> values) {
    absl::Status result;
    std::promise<void> done;
    engine_->ReadRows(rows, values, [&](absl::Status status) {
      result = status;
      done.set_value();
    });
    done.get_future().wait();
    return result;
  }

  absl::Status Assign(const Engine::RowSelection& rows, absl::Span<const float> values) {
    absl::Status result;
    std::promise<void> done;
    engine_->AssignRows(rows, values, [&](absl::Status status) {
      result = status;
      done.set_value();
    });
    done.get_future().wait();
    return result;
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

  // Rows updated.
  static int64_t Wait(const std::function<void(Engine::ApplyCallback)>& apply) {
    int64_t result = -1;
    std::promise<void> done;
    apply([&](absl::StatusOr<ApplyResult> updated) {
      EXPECT_TRUE(updated.ok()) << updated.status();
      if (updated.ok()) result = updated->rows_updated;
      done.set_value();
    });
    done.get_future().wait();
    return result;
  }

  ModelSpec spec_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace emberd::shard::testing
