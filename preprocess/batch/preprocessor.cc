#include "preprocess/batch/preprocessor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/recycler.h"
#include "preprocess/batch/batch_steps.h"
#include "preprocess/batch/batch_storage.h"

namespace emberd::preprocess {
namespace {

using BatchRecycler = Recycler<BatchStorage>;

// Idle batches kept; more batches than that in flight cost allocations only.
constexpr size_t kIdleBatches = 16;

// Puts the bookkeeping of a shared pointer into the batch that it shares, and recycles the batch
// after the last use.
template <typename T>
class InBatchAllocator {
 public:
  using value_type = T;
  InBatchAllocator(BatchRecycler* batches, BatchStorage* batch)
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
  BatchRecycler* batches_;
  BatchStorage* batch_;
};

// A batch in preparation; goes back to the recycler unless it is shared.
class BatchLease {
 public:
  explicit BatchLease(BatchRecycler* batches) : batches_(batches), batch_(batches->Take()) {}
  BatchLease(const BatchLease&) = delete;
  BatchLease& operator=(const BatchLease&) = delete;
  ~BatchLease() {
    if (batch_ != nullptr) batches_->Give(std::move(batch_));
  }

  BatchStorage* get() const { return batch_.get(); }
  std::shared_ptr<const PreprocessedBatch> Share() {
    BatchStorage* batch = batch_.release();
    const auto keep = [](const PreprocessedBatch*) {};
    return std::shared_ptr<const PreprocessedBatch>(batch, keep,
                                                    InBatchAllocator<char>(batches_, batch));
  }

 private:
  BatchRecycler* batches_;
  std::unique_ptr<BatchStorage> batch_;
};

class SortedBatchImpl final : public SortedBatch {
 public:
  explicit SortedBatchImpl(BatchRecycler* batches) : lease(batches) {}
  bool needs_minibatches() const override { return needed; }

  BatchLease lease;
  bool needed = false;
};

class PreprocessorImpl final : public Preprocessor {
 public:
  PreprocessorImpl(const v1::ModelConfig& model, const Plan& plan, int threads)
      : steps_(model, plan, threads), batches_(kIdleBatches) {}

  absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Run(
      absl::Span<const FeatureInput> inputs) override {
    BatchLease lease(&batches_);
    absl::Status status = steps_.Sort(inputs, lease.get());
    if (!status.ok()) return status;
    absl::StatusOr<CutSet> cuts = 0;
    if (steps_.NeedsMinibatches(*lease.get())) cuts = steps_.FindCuts(lease.get());
    if (!cuts.ok()) return cuts.status();
    steps_.Finish(*cuts, lease.get());
    return lease.Share();
  }

  absl::StatusOr<std::unique_ptr<SortedBatch>> Sort(
      absl::Span<const FeatureInput> inputs) override {
    auto sorted = std::make_unique<SortedBatchImpl>(&batches_);
    absl::Status status = steps_.Sort(inputs, sorted->lease.get());
    if (!status.ok()) return status;
    sorted->needed = steps_.NeedsMinibatches(*sorted->lease.get());
    return sorted;
  }

  absl::StatusOr<uint64_t> FindCuts(SortedBatch* batch) override {
    return steps_.FindCuts(static_cast<SortedBatchImpl*>(batch)->lease.get());
  }

  absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Finish(
      std::unique_ptr<SortedBatch> batch, uint64_t cuts) override {
    BatchLease& lease = static_cast<SortedBatchImpl*>(batch.get())->lease;
    if (cuts != 0) {
      // Usually done already; a batch that needs no cuts of its own may still need its buckets.
      const absl::StatusOr<CutSet> own = steps_.FindCuts(lease.get());
      if (!own.ok()) return own.status();
    }
    steps_.Finish(cuts, lease.get());
    return lease.Share();
  }

 private:
  BatchSteps steps_;
  BatchRecycler batches_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Preprocessor>> Preprocessor::Create(const v1::ModelConfig* model,
                                                                   const Plan* plan,
                                                                   PreprocessorOptions options) {
  if (options.threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads: ", options.threads, " is not allowed; it must be >= 1"));
  }
  return std::make_unique<PreprocessorImpl>(*model, *plan, options.threads);
}

}  // namespace emberd::preprocess
