#include "shard/engine.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/floats.h"
#include "base/status.h"
#include "shard/gather/pooling.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {
namespace {

constexpr int64_t kRowsPerReadChunk = 4096;

StackShape ShapeOf(const StackStore& store) {
  StackShape shape;
  shape.partitions = store.partitions();
  shape.rows_per_partition = store.rows_per_partition();
  shape.result_mode = store.spec().result_mode;
  shape.sum_bytes = sizeof(int32_t) + store.width() * sizeof(float);
  shape.row_bytes = static_cast<int64_t>(store.row_bytes());
  shape.store = &store;
  return shape;
}

// Notes that the stack was `seen`.
absl::Status CheckStackOfBatch(int stack, const Model& model, std::vector<bool>& seen) {
  if (stack < 0 || stack >= model.stack_count() || seen[stack]) {
    return absl::InvalidArgumentError(absl::StrCat("batch: stack ", stack, " must be in [0, ",
                                                   model.stack_count(), ") and be given once"));
  }
  seen[stack] = true;
  return absl::OkStatus();
}

std::string IdText(uint64_t model_id) {
  return absl::StrCat("model_id ", absl::Hex(model_id, absl::kZeroPad16));
}

// Copying rows is cut into chunks of about this many bytes, so that threads share it evenly.
constexpr int64_t kCopyChunkBytes = int64_t{1} << 20;
// To read so much takes a few microseconds, about as long as to wake a thread.
constexpr int64_t kTinyGatherBytes = int64_t{256} << 10;

// Of a row that a gather of `entries` returns.
int64_t BytesPerRow(const StackStore& store, const StackEntries& entries) {
  return entries.rounded ? RoundedRowBytes(store.spec()) : static_cast<int64_t>(store.row_bytes());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options) {
  if (options.bytes_per_partition < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes_per_partition ", options.bytes_per_partition, " must be >= 0"));
  }
  if (options.memory == nullptr) {
    ASSIGN_OR_RETURN(options.memory, MemoryManager::Create({.bytes = options.bytes_per_partition}));
  }
  return absl::WrapUnique(new Engine(options));
}

Engine::Engine(const EngineOptions& options)
    : options_(options),
      evicting_(options.memory->evicts() ? options.memory.get() : nullptr),
      shared_(std::make_shared<SharedStacks>(options)),
      pool_(options.idle_buffer_bytes),
      executor_(options.cpu) {}

absl::StatusOr<std::shared_ptr<Model>> Engine::FindModel(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
  const auto it = models_.find(model_id);
  if (it == models_.end()) return absl::NotFoundError(IdText(model_id) + " is not known");
  return it->second;
}

absl::Status Engine::DamageOf(uint64_t model_id) const {
  const auto model = FindModel(model_id);
  return model.ok() ? (*model)->Damage() : absl::OkStatus();
}

absl::Status Engine::CreateModel(const ModelSpec& spec) {
  ASSIGN_OR_RETURN(std::shared_ptr<Model> model, MakeModel(spec, /*alone=*/false));
  return AddModel(std::move(model));
}

absl::StatusOr<std::shared_ptr<Model>> Engine::MakeModel(const ModelSpec& spec, bool alone) {
  if (FindModel(spec.model_id).ok()) {
    return absl::AlreadyExistsError(IdText(spec.model_id) + " exists");
  }
  return Model::Create(spec, options_, shared_.get(), alone);
}

absl::Status Engine::AddModel(std::shared_ptr<Model> model) {
  for (int i = 0; i < model->stack_count(); ++i) model->stack(i).FillIfSmall(options_);
  const uint64_t id = model->spec().model_id;
  {
    absl::MutexLock lock(&mutex_);
    if (!models_.emplace(id, model).second) return absl::AlreadyExistsError(IdText(id) + " exists");
  }
  model->OpenShared();
  model->MayEvict();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Snapshot>> Engine::MakeSnapshot(absl::Span<const uint64_t> model_ids,
                                                               const SnapshotOptions& options) {
  std::vector<std::shared_ptr<Model>> models;
  std::vector<MemoryManager::Use> uses;
  for (const uint64_t id : model_ids) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(id));
    // What the others have saved counts as saved.
    if (options.changed_only && model->shares()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "model ", model->spec().name, " has shared tables, so all its rows must be saved"));
    }
    ASSIGN_OR_RETURN(MemoryManager::Use use, model->Hold());
    uses.push_back(std::move(use));
    models.push_back(model);
  }
  auto snapshot =
      std::make_shared<Snapshot>(std::move(models), std::move(uses), options, &executor_, &pool_);
  absl::MutexLock lock(&order_mutex_);
  for (const StackStore* stack : snapshot->stores()) {
    if (!in_snapshots_.contains(stack)) continue;
    return absl::AbortedError(absl::StrCat("another checkpoint with the rows of stack '",
                                           stack->spec().name, "' is being saved; try again"));
  }
  in_snapshots_.insert(snapshot->stores().begin(), snapshot->stores().end());
  return snapshot;
}

void Engine::StartSnapshot(Snapshot& snapshot) {
  absl::MutexLock lock(&order_mutex_);
  executor_.Submit(snapshot.BeginJobs());
}

void Engine::EndSnapshot(const std::shared_ptr<Snapshot>& snapshot, bool kept) {
  snapshot->Cancel();  // writers that still wait for its reader
  absl::MutexLock lock(&order_mutex_);
  for (const StackStore* stack : snapshot->stores()) in_snapshots_.erase(stack);
  executor_.Submit(snapshot->EndJobs(kept));
}

absl::StatusOr<std::shared_ptr<Model>> Engine::TakeModel(uint64_t model_id) {
  std::shared_ptr<Model> model;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = models_.find(model_id);
    if (it == models_.end()) return absl::NotFoundError(IdText(model_id) + " is not known");
    model = std::move(it->second);
    models_.erase(it);
  }
  // Not when the last work on it ends: whoever creates it again gets other rows.
  model->Drop();
  return model;
}

absl::Status Engine::DropModel(uint64_t model_id) { return TakeModel(model_id).status(); }

absl::StatusOr<std::shared_ptr<const Batch>> Engine::PrepareBatch(
    uint64_t model_id, std::vector<preprocess::StackBatchView> stacks,
    std::shared_ptr<const void> owner, const GatherPlaces& places, v1::DataType activation_dtype,
    bool for_update) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(model_id));
  std::vector<bool> seen(model->stack_count());
  std::vector<StackEntries> arranged;
  for (const preprocess::StackBatchView& view : stacks) {
    RETURN_IF_ERROR(CheckStackOfBatch(view.stack, *model, seen));
    StackShape shape = ShapeOf(model->stack(view.stack));
    shape.orders_touches = for_update;
    const StackSpec& spec = model->stack(view.stack).spec();
    if (view.single_rows && activation_dtype == v1::BFLOAT16 && MayRound(spec)) {
      shape.rounded = true;
      shape.row_bytes = RoundedRowBytes(spec);
    }
    if (const SumPlaces* of_stack = places.Find(view.stack)) {
      RETURN_IF_ERROR(CheckSumPlaces(*of_stack, view, model->stack(view.stack).width()));
      // What is written where it is read need not be short.
      if (shape.result_mode != v1::UNIQUE_ROWS) shape.result_mode = v1::PARTIAL_SUMS;
    }
    ASSIGN_OR_RETURN(StackEntries entries, ArrangeEntries(view, shape, pool_, *options_.cpu));
    arranged.push_back(std::move(entries));
  }
  return std::make_shared<const Batch>(model, std::move(arranged));
}

absl::StatusOr<std::shared_ptr<const Batch>> Engine::RestoreBatch(
    uint64_t model_id, std::vector<StackEntries> stacks) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(model_id));
  std::vector<bool> seen(model->stack_count());
  for (const StackEntries& entries : stacks) {
    RETURN_IF_ERROR(CheckStackOfBatch(entries.stack, *model, seen));
    RETURN_IF_ERROR(CheckEntries(entries, ShapeOf(model->stack(entries.stack))));
  }
  return std::make_shared<const Batch>(model, std::move(stacks));
}

void Engine::Later(std::function<void()> done) {
  Job job;
  job.run = [](int) {};
  job.done = std::move(done);
  executor_.Submit({std::move(job)});
}

void Engine::Apply(StagedUpdate update, ApplyCallback done) {
  absl::StatusOr<std::shared_ptr<Model>> model = update.model();
  if (!model.ok()) {
    return Later([done = std::move(done), status = model.status()] { done(status); });
  }
  if (update.skip()) return Later([done = std::move(done)] { done(ApplyResult()); });
  const auto work = std::make_shared<UpdateWork>(*std::move(model), std::move(update), pool_);
  work->done = std::move(done);
  std::vector<Job> jobs;
  for (const StackUpdate& stack : work->stacks()) {
    if (stack.store->first_epoch() > epoch_) continue;
    for (int k = 0; k < stack.store->partitions(); ++k) {
      if (stack.partition_entries(k) > 0) jobs.push_back(UpdateJob(work, stack, k));
    }
  }
  work->jobs_left = static_cast<int>(jobs.size());
  const bool nothing_to_do = jobs.empty();
  {
    absl::MutexLock lock(&order_mutex_);
    work->TakePlace();
    executor_.Submit(std::move(jobs));
  }
  if (nothing_to_do) Later([work] { work->done(work->Result()); });
}

Job Engine::UpdateJob(std::shared_ptr<UpdateWork> work, const StackUpdate& stack, int k) {
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

void Engine::ReadRows(const RowSelection& rows, absl::Span<float> values, DoneCallback done) {
  absl::StatusOr<std::shared_ptr<Model>> model = FindModel(rows.model_id);
  if (!model.ok()) return done(model.status());
  absl::StatusOr<RowTarget> target = ResolveRows(**model, rows, values.size(), false);
  if (!target.ok()) return done(target.status());
  absl::StatusOr<MemoryManager::Use> use = (*model)->Hold();
  if (!use.ok()) return done(use.status());
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
  job.done = [done = std::move(done), use = std::make_shared<MemoryManager::Use>(*std::move(use))] {
    *use = nullptr;
    done(absl::OkStatus());
  };
  executor_.Submit({std::move(job)});
}

struct Engine::StagedAssign {
  std::shared_ptr<Model> model;
  MemoryManager::Use use;
  RowTarget target;
  absl::Span<const float> values;
  std::shared_ptr<const void> owner;
};

absl::StatusOr<std::shared_ptr<const Engine::StagedAssign>> Engine::StageAssign(
    const RowSelection& rows, absl::Span<const float> values, std::shared_ptr<const void> owner) {
  ASSIGN_OR_RETURN(std::shared_ptr<Model> model, FindModel(rows.model_id));
  ASSIGN_OR_RETURN(RowTarget target, ResolveRows(*model, rows, values.size(), /*writing=*/true));
  if (const int64_t bad = FindNonFinite(values); bad >= 0) {
    return absl::InvalidArgumentError(absl::StrCat("values: ", values[bad], " of row ",
                                                   bad / rows.columns, ", column ",
                                                   bad % rows.columns, " must be finite"));
  }
  ASSIGN_OR_RETURN(MemoryManager::Use use, model->Hold());
  return std::make_shared<const StagedAssign>(
      StagedAssign{std::move(model), std::move(use), std::move(target), values, std::move(owner)});
}

absl::Status Engine::Check(const StagedAssign& assign) {
  return assign.model->dropped() ? absl::NotFoundError("the model was dropped") : absl::OkStatus();
}

void Engine::Assign(std::shared_ptr<const StagedAssign> assign, DoneCallback done) {
  if (absl::Status gone = Check(*assign); !gone.ok()) {
    return Later([done = std::move(done), gone = std::move(gone)] { done(gone); });
  }
  if (assign->target.store->first_epoch() > epoch_) {
    return Later([done = std::move(done)] { done(absl::OkStatus()); });
  }
  Job job;
  job.strands = assign->target.strands;
  job.mode = Job::Mode::kWrite;
  job.run = [assign](int) {
    const auto count = static_cast<int64_t>(assign->target.rows.size());
    CopyRowsIn(assign->target, 0, count, assign->values.data());
  };
  job.done = [done = std::move(done)] { done(absl::OkStatus()); };
  executor_.Submit({std::move(job)});
}

int64_t Engine::UntouchedBytes(uint64_t model_id) const {
  const auto model = FindModel(model_id);
  if (!model.ok()) return 0;
  int64_t sum = 0;
  for (int i = 0; i < (*model)->stack_count(); ++i) sum += (*model)->stack(i).UntouchedBytes();
  return sum;
}

absl::StatusOr<std::shared_ptr<const void>> Engine::RoomFor(const Batch& batch) const {
  ASSIGN_OR_RETURN(const auto model, batch.model());
  const int64_t cores = model->spec().partition_count;
  return model->Keep((batch.bytes() + cores - 1) / cores);
}

int64_t Engine::BytesToTouch(const Batch& batch) const {
  const auto model = batch.model();
  if (!model.ok()) return 0;
  int64_t bytes = 0;
  for (const StackEntries& entries : batch.stacks()) {
    const StackStore& store = (*model)->stack(entries.stack);
    if (entries.rows_touched || store.Complete()) continue;
    NewPages pages(store);
    for (int64_t i = 0; i < entries.entry_count; ++i) pages.Add(entries.entries.data()[i].row);
    bytes += pages.bytes();
  }
  return bytes;
}

int64_t Engine::BytesToTouch(const RowSelection& rows) const {
  const auto model = FindModel(rows.model_id);
  if (!model.ok()) return 0;
  const auto target =
      ResolveRows(**model, rows, rows.local_rows.size() * rows.columns, /*writing=*/false);
  if (!target.ok() || target->store->Complete()) return 0;
  NewPages pages(*target->store);
  for (const int64_t row : target->rows) pages.Add(row);
  return pages.bytes();
}

EngineStatistics Engine::Statistics() const {
  EngineStatistics statistics;
  statistics.queued = executor_.queued();
  {
    absl::MutexLock lock(&mutex_);
    statistics.models = static_cast<int>(models_.size());
    for (const auto& [id, model] : models_) {
      statistics.table_bytes += model->own_bytes_per_partition() * model->spec().partition_count;
      const size_t partitions = model->spec().partition_count;
      if (statistics.partitions.size() < partitions) statistics.partitions.resize(partitions);
      for (size_t k = 0; k < partitions; ++k) {
        statistics.partitions[k].table_bytes += model->own_bytes_per_partition();
      }
    }
  }
  const int64_t shared = shared_->bytes_per_partition();
  for (PartitionStatistics& partition : statistics.partitions) {
    partition.table_bytes += shared;
    statistics.table_bytes += shared;
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

std::vector<HotTable> Engine::HotRows(int count) const {
  std::vector<std::shared_ptr<Model>> models;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, model] : models_) models.push_back(model);
  }
  std::vector<HotTable> tables;
  for (const std::shared_ptr<Model>& model : models) {
    for (int stack = 0; stack < model->stack_count(); ++stack) {
      for (HotTable& table : model->hot_rows(stack).Top(count)) {
        table.model = model->spec().name;
        // Rows that models share may have another name in each.
        const StackSpec& spec = model->spec().stacks[stack];
        if (!spec.resource.empty()) table.table = spec.tables.front().name;
        tables.push_back(std::move(table));
      }
    }
  }
  std::sort(tables.begin(), tables.end(), [](const HotTable& a, const HotTable& b) {
    return std::tie(a.model, a.table) < std::tie(b.model, b.table);
  });
  return tables;
}

// The reading half of the engine: a job for each stack of a batch, which pools its rows or copies
// them.

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
      work->use = nullptr;
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
  rows.rows_gathered = entries.entry_count;
  const auto count = static_cast<int64_t>(entries.distinct_rows.size());
  const auto buffer = std::make_shared<PooledArray<char>>(pool_, count * rows.row_bytes);
  const CopyRowsArgs all = {store.weights(), static_cast<int64_t>(store.row_bytes()),
                            entries.distinct_rows.data(), count, buffer->data()};
  rows.rows = *buffer;
  rows.owner = buffer;
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
