// The reading half of the engine: a job for each stack of a batch, which pools its rows or copies
// them.
#include <algorithm>
#include <atomic>
#include <utility>

#include "shard/batch/batch.h"
#include "shard/engine.h"
#include "shard/executor.h"
#include "shard/gather/gather_kernels.h"
#include "shard/gather/pooling.h"
#include "shard/store/model.h"

namespace emberd::shard {
namespace {

// Copying rows is cut into chunks of about this many bytes, so that threads share it evenly.
constexpr int64_t kCopyChunkBytes = int64_t{1} << 20;
// To read so much takes a few microseconds, about as long as to wake a thread.
constexpr int64_t kTinyGatherBytes = int64_t{32} << 10;

// Of a row that a gather of `entries` returns.
int64_t BytesPerRow(const StackStore& store, const StackEntries& entries) {
  return entries.rounded ? RoundedRowBytes(store.spec()) : static_cast<int64_t>(store.row_bytes());
}

}  // namespace

// One Gather on its way: shared by the jobs of its stacks.
struct Engine::GatherWork {
  std::shared_ptr<Model> model;
  MemoryManager::Use use;
  std::shared_ptr<const Batch> batch;
  GatherPlaces places;
  GatherCallback done;
  GatherOutput output;
  std::atomic<int> jobs_left;
};

void Engine::Gather(std::shared_ptr<const Batch> batch, GatherPlaces places, GatherCallback done) {
  absl::StatusOr<std::shared_ptr<Model>> model = batch->model();
  if (!model.ok()) return done(model.status());
  absl::StatusOr<MemoryManager::Use> use = (*model)->Hold();
  if (!use.ok()) return done(use.status());
  auto work = std::make_shared<GatherWork>();
  work->model = *std::move(model);
  work->use = *std::move(use);
  work->batch = std::move(batch);
  work->places = std::move(places);
  work->done = std::move(done);
  if (work->batch->stacks().empty()) return work->done(GatherOutput());
  work->jobs_left = static_cast<int>(work->batch->stacks().size());
  int64_t bytes = 0;
  for (const StackEntries& entries : work->batch->stacks()) {
    bytes +=
        entries.entry_count * static_cast<int64_t>(work->model->stack(entries.stack).row_bytes());
  }
  std::vector<Job> jobs;
  for (const StackEntries& entries : work->batch->stacks()) {
    jobs.push_back(entries.unique_rows ? CopyJob(work, entries) : SumJob(work, entries));
    jobs.back().strands = work->model->stack(entries.stack).AllStrands();
    jobs.back().mode = Job::Mode::kRead;
    jobs.back().tiny = bytes <= kTinyGatherBytes;
    jobs.back().done = [this, work, &entries] {
      for (size_t k = 0; k < entries.partition_entries.size(); ++k) {
        partitions_[k].rows_gathered += entries.partition_entries[k];
      }
      work->model->hot_rows(entries.stack).Sample(entries);
      if (--work->jobs_left > 0) return;
      work->use.End();
      work->done(std::move(work->output));
    };
  }
  executor_.Submit(std::move(jobs));
}

int64_t Engine::GatherBytes(const Batch& batch, const GatherPlaces& places) const {
  const auto model = batch.model();
  if (!model.ok()) return 0;
  int64_t bytes = 0;
  for (const StackEntries& entries : batch.stacks()) {
    const StackStore& store = (*model)->stack(entries.stack);
    if (entries.unique_rows) {
      bytes += static_cast<int64_t>(entries.distinct_rows.size()) * BytesPerRow(store, entries);
      continue;
    }
    const auto samples = static_cast<int64_t>(entries.samples.size());
    int64_t rows = samples;
    const SumPlaces* const of_stack = places.Find(entries.stack);
    if (of_stack != nullptr) rows = std::min(rows, of_stack->CountPassedOver());
    bytes += samples * static_cast<int64_t>(sizeof(int32_t)) +
             rows * static_cast<int64_t>(store.spec().embedding_dim * sizeof(float));
  }
  return bytes;
}

Job Engine::SumJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries) {
  StackStore& store = work->model->stack(entries.stack);
  const auto pooling =
      std::make_shared<Pooling>(store.spec(), store.weights(), entries, pool_,
                                work->places.Find(entries.stack), &work->places.room);
  work->output.sums.push_back(pooling->TakeSums());
  Job job;
  job.chunks = pooling->chunks();
  job.run = [&store, pooling, touched = entries.rows_touched](int chunk) {
    if (!touched && !store.Complete()) {
      for (const Entry& entry : pooling->Entries(chunk)) store.EnsureRow(entry.row);
    }
    pooling->Run(chunk);
  };
  return job;
}

Job Engine::CopyJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries) {
  StackStore& store = work->model->stack(entries.stack);
  StackRows& rows = work->output.rows.emplace_back();
  rows.stack = entries.stack;
  rows.row_bytes = BytesPerRow(store, entries);
  rows.rounded = entries.rounded;
  rows.count = static_cast<int64_t>(entries.distinct_rows.size());
  rows.rows_gathered = entries.entry_count;
  auto buffer = std::make_shared<PooledArray<char>>(pool_, rows.count * rows.row_bytes);
  const CopyRowsArgs all = {store.weights(), static_cast<int64_t>(store.row_bytes()),
                            entries.distinct_rows.data(), rows.count, buffer->data()};
  rows.rows = std::move(buffer);
  const int64_t per_chunk = std::max<int64_t>(1, kCopyChunkBytes / all.row_bytes);
  Job job;
  job.chunks = static_cast<int>(std::max<int64_t>(1, (all.count + per_chunk - 1) / per_chunk));
  job.run = [&store, all, per_chunk, &entries, to_bytes = rows.row_bytes](int chunk) {
    CopyRowsArgs args = all;
    const int64_t begin = chunk * per_chunk;
    args.rows += begin;
    args.count = std::min(per_chunk, all.count - begin);
    args.out += begin * to_bytes;
    if (!entries.rows_touched && !store.Complete()) {
      for (int64_t i = 0; i < args.count; ++i) store.EnsureRow(args.rows[i]);
    }
    if (entries.rounded) {
      CopyRoundedRows(args);
    } else {
      CopyRows(args);
    }
  };
  return job;
}

}  // namespace emberd::shard
