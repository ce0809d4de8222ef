#include "shard/engine.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/buffer_pool.h"
#include "shard/batch/batch.h"
#include "shard/executor.h"
#include "shard/gather/copy_rows.h"
#include "shard/gather/forward_kernel.h"
#include "shard/gather/pooled_buffer.h"
#include "shard/gather/pooling.h"
#include "shard/store/model.h"
#include "shard/store/row_access.h"
#include "shard/update/apply_check.h"
#include "shard/update/apply_work.h"

namespace emberd::shard {
namespace {

// Copying rows is cut into chunks of about this many bytes, so that threads share it evenly.
constexpr int64_t kCopyChunkBytes = int64_t{1} << 20;
constexpr int64_t kRowsPerReadChunk = 4096;
constexpr int kMaxPartitions = 64;

StackShape ShapeOf(const StackStore& store) {
  StackShape shape;
  shape.partitions = store.partitions();
  shape.rows_per_partition = store.rows_per_partition();
  shape.result_mode = store.spec().result_mode;
  shape.sum_bytes = sizeof(int32_t) + store.width() * sizeof(float);
  shape.row_bytes = static_cast<int64_t>(store.row_bytes());
  return shape;
}

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(const EngineOptions& options)
      : store_options_{options.eager_bytes, options.huge_page_bytes},
        budget_(std::make_shared<Budget>(options.bytes_per_partition)),
        executor_(options.threads) {}

  absl::Status CreateModel(const ModelSpec& spec) override;
  absl::Status DropModel(uint64_t model_id) override;
  absl::StatusOr<std::shared_ptr<const Batch>> PrepareBatch(
      uint64_t model_id, std::vector<preprocess::StackBatchView> stacks,
      std::shared_ptr<const void> owner) override;
  int64_t BatchBytes(const Batch& batch) const override;
  void Gather(std::shared_ptr<const Batch> batch, GatherCallback done) override;
  absl::Status CheckApply(const Batch& batch, const ApplyInput& input) const override;
  void Apply(std::shared_ptr<const Batch> batch, ApplyInput input, ApplyCallback done) override;
  absl::Status CheckApplyParts(absl::Span<const ApplyPart> parts) const override;
  void ApplyParts(std::vector<ApplyPart> parts, ApplyCallback done) override;
  void ReadRows(const RowSelection& rows, absl::Span<float> values, DoneCallback done) override;
  void AssignRows(const RowSelection& rows, absl::Span<const float> values,
                  DoneCallback done) override;
  EngineStatistics Statistics() const override;
  std::vector<HotTable> HotRows(int count) const override;

 private:
  struct GatherWork;
  absl::StatusOr<std::shared_ptr<Model>> FindModel(uint64_t model_id) const;
  // Add a stack's result to the work's output, to be filled by the job.
  Job SumJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries);
  Job CopyJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries);
  Job ApplyJob(std::shared_ptr<ApplyWork> work, const StackUpdate& stack, int k);

  const StoreOptions store_options_;
  const std::shared_ptr<Budget> budget_;
  BufferPool pool_;

  mutable std::mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Model>> models_ ABSL_GUARDED_BY(mutex_);

  // Held while an update takes its turn and its strands, so that both have one order.
  std::mutex turn_mutex_;

  struct PartitionCounts {
    std::atomic<int64_t> rows_gathered{0};
    std::atomic<int64_t> rows_updated{0};
  };
  PartitionCounts partitions_[kMaxPartitions];

  Executor executor_;  // last: its destructor waits for work that uses the rest
};

absl::StatusOr<std::shared_ptr<Model>> EngineImpl::FindModel(uint64_t model_id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = models_.find(model_id);
  if (it == models_.end())
    return absl::NotFoundError(absl::StrCat("model_id ", model_id, " is not known"));
  return it->second;
}

absl::Status EngineImpl::CreateModel(const ModelSpec& spec) {
  const auto exists = [&] {
    return absl::AlreadyExistsError(absl::StrCat("model_id ", spec.model_id, " exists"));
  };
  if (FindModel(spec.model_id).ok()) return exists();
  absl::StatusOr<std::shared_ptr<Model>> model =
      Model::Create(spec, store_options_, budget_, executor_);
  if (!model.ok()) return model.status();
  std::lock_guard<std::mutex> lock(mutex_);
  return models_.emplace(spec.model_id, *std::move(model)).second ? absl::OkStatus() : exists();
}

absl::Status EngineImpl::DropModel(uint64_t model_id) {
  std::shared_ptr<Model> model;  // unmapped after the lock is gone
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = models_.find(model_id);
  if (it == models_.end())
    return absl::NotFoundError(absl::StrCat("model_id ", model_id, " is not known"));
  model = std::move(it->second);
  models_.erase(it);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Batch>> EngineImpl::PrepareBatch(
    uint64_t model_id, std::vector<preprocess::StackBatchView> stacks,
    std::shared_ptr<const void> owner) {
  absl::StatusOr<std::shared_ptr<Model>> model = FindModel(model_id);
  if (!model.ok()) return model.status();
  std::vector<bool> seen((*model)->stack_count());
  std::vector<StackEntries> arranged;
  for (const preprocess::StackBatchView& view : stacks) {
    if (view.stack < 0 || view.stack >= (*model)->stack_count() || seen[view.stack]) {
      return absl::InvalidArgumentError(absl::StrCat("batch: stack ", view.stack,
                                                     " must be in [0, ", (*model)->stack_count(),
                                                     ") and stand there once"));
    }
    seen[view.stack] = true;
    const StackStore& store = (*model)->stack(view.stack);
    absl::StatusOr<StackEntries> entries = ArrangeEntries(view, ShapeOf(store), pool_, executor_);
    if (!entries.ok()) return entries.status();
    arranged.push_back(*std::move(entries));
  }
  return std::make_shared<const Batch>(*model, std::move(arranged));
}

int64_t EngineImpl::BatchBytes(const Batch& batch) const {
  int64_t bytes = sizeof(Batch);
  for (const StackEntries& stack : batch.stacks()) bytes += sizeof(StackEntries) + stack.bytes();
  return bytes;
}

// One Gather on its way: shared by the jobs of its stacks.
struct EngineImpl::GatherWork {
  std::shared_ptr<Model> model;
  std::shared_ptr<const Batch> batch;
  GatherCallback done;
  GatherOutput output;
  std::atomic<int> jobs_left;
};

void EngineImpl::Gather(std::shared_ptr<const Batch> batch, GatherCallback done) {
  auto work = std::make_shared<GatherWork>();
  work->model = batch->model();
  if (work->model == nullptr) return done(ModelDropped());
  work->batch = std::move(batch);
  work->done = std::move(done);
  if (work->batch->stacks().empty()) return work->done(GatherOutput());
  work->jobs_left = static_cast<int>(work->batch->stacks().size());
  std::vector<Job> jobs;
  for (const StackEntries& entries : work->batch->stacks()) {
    jobs.push_back(entries.unique_rows ? CopyJob(work, entries) : SumJob(work, entries));
    jobs.back().strands = work->model->stack(entries.stack).AllStrands();
    jobs.back().mode = Job::Mode::kRead;
    jobs.back().done = [this, work, &entries] {
      for (size_t k = 0; k < entries.partition_entries.size(); ++k) {
        partitions_[k].rows_gathered += entries.partition_entries[k];
      }
      work->model->hot_rows(entries.stack).Sample(entries);
      if (--work->jobs_left == 0) work->done(std::move(work->output));
    };
  }
  executor_.Submit(std::move(jobs));
}

Job EngineImpl::SumJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries) {
  StackStore& store = work->model->stack(entries.stack);
  StackSums& sums = work->output.sums.emplace_back();
  sums.stack = entries.stack;
  sums.width = store.width();
  sums.samples.assign(entries.samples.data(), entries.samples.data() + entries.samples.size());
  sums.rows_gathered = entries.entry_count;
  auto buffer =
      std::make_shared<PooledBuffer<float>>(pool_, int64_t{sums.width} * sums.samples.size());
  const ForwardArgs all = MakeForwardArgs(store.spec(), store.weights(), entries, buffer->data());
  sums.sums = std::move(buffer);
  std::vector<int64_t> begins = CutSamples(entries, store.width());
  Job job;
  job.chunks = static_cast<int>(begins.size()) - 1;
  job.run = [&store, all, begins = std::move(begins)](int chunk) {
    ForwardArgs args = all;
    args.begin = begins[chunk];
    args.end = begins[chunk + 1];
    if (!store.Complete()) {
      for (uint32_t j = args.offsets[args.begin]; j < args.offsets[args.end]; ++j) {
        store.EnsureRow(args.entries[j].row);
      }
    }
    SumRows(args);
  };
  return job;
}

Job EngineImpl::CopyJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries) {
  StackStore& store = work->model->stack(entries.stack);
  StackRows& rows = work->output.rows.emplace_back();
  rows.stack = entries.stack;
  rows.row_bytes = static_cast<int64_t>(store.row_bytes());
  rows.count = static_cast<int64_t>(entries.distinct_rows.size());
  rows.rows_gathered = entries.entry_count;
  auto buffer = std::make_shared<PooledBuffer<char>>(pool_, rows.count * rows.row_bytes);
  const CopyRowsArgs all = {store.weights(), rows.row_bytes, entries.distinct_rows.data(),
                            rows.count, buffer->data()};
  rows.rows = std::move(buffer);
  const int64_t per_chunk = std::max<int64_t>(1, kCopyChunkBytes / all.row_bytes);
  Job job;
  job.chunks = static_cast<int>(std::max<int64_t>(1, (all.count + per_chunk - 1) / per_chunk));
  job.run = [&store, all, per_chunk](int chunk) {
    CopyRowsArgs args = all;
    const int64_t begin = chunk * per_chunk;
    args.rows += begin;
    args.count = std::min(per_chunk, all.count - begin);
    args.out += begin * args.row_bytes;
    if (!store.Complete()) {
      for (int64_t i = 0; i < args.count; ++i) store.EnsureRow(args.rows[i]);
    }
    CopyRows(args);
  };
  return job;
}

absl::Status EngineImpl::CheckApply(const Batch& batch, const ApplyInput& input) const {
  const std::shared_ptr<Model> model = batch.model();
  return model == nullptr ? ModelDropped() : CheckApplyInput(*model, batch, input);
}

absl::Status EngineImpl::CheckApplyParts(absl::Span<const ApplyPart> parts) const {
  return shard::CheckApplyParts(parts);
}

void EngineImpl::Apply(std::shared_ptr<const Batch> batch, ApplyInput input, ApplyCallback done) {
  std::vector<ApplyPart> parts;
  parts.push_back({std::move(batch), std::move(input)});
  ApplyParts(std::move(parts), std::move(done));
}

void EngineImpl::ApplyParts(std::vector<ApplyPart> parts, ApplyCallback done) {
  if (parts.empty()) return done(ApplyResult());
  absl::StatusOr<std::shared_ptr<ApplyWork>> work = ApplyWork::Make(std::move(parts), pool_);
  if (!work.ok()) return done(work.status());
  (*work)->done = std::move(done);
  std::vector<Job> jobs;
  for (const StackUpdate& stack : (*work)->stacks()) {
    for (int k = 0; k < stack.store->partitions(); ++k) {
      if (stack.partition_entries(k) > 0) jobs.push_back(ApplyJob(*work, stack, k));
    }
  }
  (*work)->jobs_left = static_cast<int>(jobs.size());
  const bool nothing_to_do = jobs.empty();
  {
    std::lock_guard<std::mutex> lock(turn_mutex_);
    (*work)->TakeTurn();
    executor_.Submit(std::move(jobs));
  }
  if (nothing_to_do) (*work)->done((*work)->Result());
}

Job EngineImpl::ApplyJob(std::shared_ptr<ApplyWork> work, const StackUpdate& stack, int k) {
  Job job;
  job.strands = {&stack.store->strand(k)};
  job.mode = Job::Mode::kWrite;
  job.run = [this, work, &stack, k](int) {
    partitions_[k].rows_updated += work->UpdatePartition(stack, k, pool_);
  };
  job.done = [work] {
    if (--work->jobs_left == 0) work->done(work->Result());
  };
  return job;
}

void EngineImpl::ReadRows(const RowSelection& rows, absl::Span<float> values, DoneCallback done) {
  absl::StatusOr<std::shared_ptr<Model>> model = FindModel(rows.model_id);
  if (!model.ok()) return done(model.status());
  absl::StatusOr<RowTarget> target = ResolveRows(**model, rows, values.size(), false);
  if (!target.ok()) return done(target.status());
  const int64_t count = target->rows.size();
  Job job;
  job.strands = target->strands;
  job.mode = Job::Mode::kRead;
  job.chunks =
      std::max<int>(1, static_cast<int>((count + kRowsPerReadChunk - 1) / kRowsPerReadChunk));
  job.run = [model = *model, target = std::make_shared<RowTarget>(*std::move(target)), count,
             values](int chunk) {
    const int64_t begin = chunk * kRowsPerReadChunk;
    CopyRowsOut(*target, begin, std::min(count, begin + kRowsPerReadChunk), values.data());
  };
  job.done = [done = std::move(done)] { done(absl::OkStatus()); };
  executor_.Submit({std::move(job)});
}

void EngineImpl::AssignRows(const RowSelection& rows, absl::Span<const float> values,
                            DoneCallback done) {
  absl::StatusOr<std::shared_ptr<Model>> model = FindModel(rows.model_id);
  if (!model.ok()) return done(model.status());
  absl::StatusOr<RowTarget> target = ResolveRows(**model, rows, values.size(), true);
  if (!target.ok()) return done(target.status());
  if (const int64_t bad = FindNonFinite(values); bad >= 0) {
    return done(absl::InvalidArgumentError(absl::StrCat("values: ", values[bad], " of row ",
                                                        bad / rows.columns, ", column ",
                                                        bad % rows.columns, " must be finite")));
  }
  const int64_t count = target->rows.size();
  Job job;
  job.strands = target->strands;
  job.mode = Job::Mode::kWrite;
  job.run = [model = *model, target = std::make_shared<RowTarget>(*std::move(target)), count,
             values](int) { CopyRowsIn(*target, 0, count, values.data()); };
  job.done = [done = std::move(done)] { done(absl::OkStatus()); };
  executor_.Submit({std::move(job)});
}

EngineStatistics EngineImpl::Statistics() const {
  EngineStatistics statistics;
  statistics.queued = executor_.queued();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    statistics.models = static_cast<int>(models_.size());
    for (const auto& [id, model] : models_) {
      statistics.table_bytes += model->bytes();
      const size_t partitions = model->spec().partition_count;
      if (statistics.partitions.size() < partitions) statistics.partitions.resize(partitions);
      for (size_t k = 0; k < partitions; ++k) {
        statistics.partitions[k].table_bytes += model->bytes_per_partition();
      }
    }
  }
  for (int k = 0; k < kMaxPartitions; ++k) {
    const int64_t gathered = partitions_[k].rows_gathered, updated = partitions_[k].rows_updated;
    statistics.rows_gathered += gathered;
    statistics.rows_updated += updated;
    if (static_cast<size_t>(k) >= statistics.partitions.size()) continue;
    statistics.partitions[k].rows_gathered = gathered;
    statistics.partitions[k].rows_updated = updated;
  }
  return statistics;
}

std::vector<HotTable> EngineImpl::HotRows(int count) const {
  std::vector<std::shared_ptr<Model>> models;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, model] : models_) models.push_back(model);
  }
  std::vector<HotTable> tables;
  for (const std::shared_ptr<Model>& model : models) {
    for (int stack = 0; stack < model->stack_count(); ++stack) {
      for (HotTable& table : model->hot_rows(stack).Top(count)) {
        table.model = model->spec().name;
        tables.push_back(std::move(table));
      }
    }
  }
  std::sort(tables.begin(), tables.end(), [](const HotTable& a, const HotTable& b) {
    return std::tie(a.model, a.table) < std::tie(b.model, b.table);
  });
  return tables;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options) {
  if (options.threads < 0 || options.threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads ", options.threads, " must be in [0, 1024]"));
  }
  if (options.bytes_per_partition < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes_per_partition ", options.bytes_per_partition, " must be >= 0"));
  }
  if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
  return std::make_unique<EngineImpl>(options);
}

}  // namespace emberd::shard
