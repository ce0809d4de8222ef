#include "preprocess/preprocessor.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "preprocess/batch_statistics.h"
#include "preprocess/batch_storage.h"
#include "preprocess/recycler.h"
#include "preprocess/slot_sorter.h"
#include "preprocess/validate.h"
#include "preprocess/worker_pool.h"

namespace emberd::preprocess {
namespace {

// Idle batches and scratch kept; more batches than that in flight cost allocations only.
constexpr size_t kIdleBatches = 16;
constexpr size_t kIdleScratch = 64;

// Puts the bookkeeping of a shared pointer into the batch that it shares, and recycles the batch
// after the last use.
template <typename T>
class InBatchAllocator {
 public:
  using value_type = T;
  InBatchAllocator(Recycler<BatchStorage>* batches, BatchStorage* batch)
      : batches_(batches), batch_(batch) {}
  template <typename U>
  explicit InBatchAllocator(const InBatchAllocator<U>& other)
      : batches_(other.batches_), batch_(other.batch_) {}

  T* allocate(size_t n) {
    static_assert(sizeof(T) <= BatchStorage::kControlBytes && alignof(T) <= 16);
    return static_cast<T*>(batch_->control_block());
  }
  void deallocate(T*, size_t) { batches_->Give(std::unique_ptr<BatchStorage>(batch_)); }
  template <typename U>
  bool operator==(const InBatchAllocator<U>& other) const {
    return batch_ == other.batch_;
  }

 private:
  template <typename U>
  friend class InBatchAllocator;
  Recycler<BatchStorage>* batches_;
  BatchStorage* batch_;
};

StackShape ShapeOf(const v1::ModelConfig& model, const Plan& plan, const StackPlan& stack) {
  StackShape shape;
  shape.partitions = plan.topology.partitions();
  shape.rows_per_partition = stack.rows_per_partition;
  for (const FeaturePlan& feature : stack.features) {
    const TablePlan& table = stack.tables[feature.table_in_stack];
    shape.features.push_back(
        {table.row_offset, table.shard_rotation, model.tables(table.table).combiner()});
  }
  return shape;
}

class PreprocessorImpl final : public Preprocessor {
 public:
  PreprocessorImpl(const v1::ModelConfig* model, const Plan* plan, PreprocessorOptions options)
      : model_(*model),
        plan_(*plan),
        workers_(options.threads),
        batches_(kIdleBatches),
        scratch_(kIdleScratch) {
    for (const StackPlan& stack : plan_.stacks) shapes_.push_back(ShapeOf(model_, plan_, stack));
  }

  absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Run(
      absl::Span<const FeatureInput> inputs) override {
    std::unique_ptr<BatchStorage> batch = batches_.Take();
    absl::Status status = Validate(inputs, batch.get());
    if (status.ok()) status = Sort(inputs, batch.get());
    if (!status.ok()) {
      batches_.Give(std::move(batch));
      return status;
    }
    WriteStatistics(plan_, batch->stacks(), batch->mutable_statistics());
    return Share(std::move(batch));
  }

 private:
  int slots() const { return plan_.topology.sparsecores_per_shard; }

  absl::Status Validate(absl::Span<const FeatureInput> inputs, BatchStorage* batch) {
    if (static_cast<int>(inputs.size()) != model_.features_size()) {
      return absl::InvalidArgumentError(absl::StrCat("features: there are ", inputs.size(),
                                                     "; allowed: ", model_.features_size()));
    }
    std::vector<absl::Status>& found = batch->feature_status();
    found.assign(inputs.size(), absl::OkStatus());
    workers_.ParallelFor(static_cast<int64_t>(inputs.size()), [&](int64_t f) {
      const auto [stack, position] = plan_.feature_at[f];
      const StackPlan& in = plan_.stacks[stack];
      const TablePlan& table = in.tables[in.features[position].table_in_stack];
      found[f] = ValidateFeature(model_.features(static_cast<int>(f)).name(), table.vocabulary_size,
                                 inputs[f]);
    });
    for (const absl::Status& status : found) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Sort(absl::Span<const FeatureInput> inputs, BatchStorage* batch) {
    batch->LayOut(plan_, model_.plan().sample_layout(), inputs);
    for (size_t k = 0; k < batch->stacks().size(); ++k) {
      StackBatch& stack = batch->stacks()[k];
      if (absl::Status status = CheckSize(plan_.stacks[k], stack); !status.ok()) return status;
      stack.gain_kind = GainKindOf(shapes_[k], stack.inputs);
    }
    ForEachSlot(batch,
                [](const StackShape& shape, StackBatch& stack, int slot, SlotScratch* scratch) {
                  SortSlot(shape, stack.inputs, stack.layout[slot], stack.gain_kind, scratch,
                           nullptr, &stack.slots[slot]);
                });
    return absl::OkStatus();
  }

  // What 32-bit indices bound.
  absl::Status CheckSize(const StackPlan& plan, const StackBatch& stack) const {
    if (stack.samples > kMaxStackSamples) {
      return absl::InvalidArgumentError(
          absl::StrCat("the features of stack '", plan.name, "' have ", stack.samples,
                       " samples together; allowed: [0, ", kMaxStackSamples, "]"));
    }
    const int64_t max_pads = kCsrAlignment * kBuckets * int64_t{plan_.topology.partitions()};
    const int64_t max_ids = std::numeric_limits<int32_t>::max() - max_pads;
    for (const SlotLayout& slot : stack.layout) {
      const int64_t ids = CountIds(slot, stack.inputs);
      if (ids <= max_ids) continue;
      return absl::ResourceExhaustedError(absl::StrCat("stack '", plan.name, "' has ", ids,
                                                       " ids in one source slot; allowed: [0, ",
                                                       max_ids, "]; send smaller batches"));
    }
    return absl::OkStatus();
  }

  // Calls work(shape, stack, slot, scratch) for every slot of every stack, in parallel.
  template <typename Work>
  void ForEachSlot(BatchStorage* batch, Work work) {
    const int64_t tasks = static_cast<int64_t>(shapes_.size()) * slots();
    workers_.ParallelFor(tasks, [&](int64_t task) {
      const int64_t stack = task / slots();
      std::unique_ptr<SlotScratch> scratch = scratch_.Take();
      work(shapes_[stack], batch->stacks()[stack], static_cast<int>(task % slots()), scratch.get());
      scratch_.Give(std::move(scratch));
    });
  }

  std::shared_ptr<const PreprocessedBatch> Share(std::unique_ptr<BatchStorage> batch) {
    BatchStorage* raw = batch.release();
    const auto keep = [](const PreprocessedBatch*) {};
    return std::shared_ptr<const PreprocessedBatch>(raw, keep,
                                                    InBatchAllocator<char>(&batches_, raw));
  }

  const v1::ModelConfig& model_;
  const Plan& plan_;
  std::vector<StackShape> shapes_;
  WorkerPool workers_;
  Recycler<BatchStorage> batches_;
  Recycler<SlotScratch> scratch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Preprocessor>> Preprocessor::Create(const v1::ModelConfig* model,
                                                                   const Plan* plan,
                                                                   PreprocessorOptions options) {
  if (options.threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads: ", options.threads, " is not allowed; it must be >= 1"));
  }
  return std::make_unique<PreprocessorImpl>(model, plan, options);
}

}  // namespace emberd::preprocess
