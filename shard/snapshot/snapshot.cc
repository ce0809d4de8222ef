#include "shard/snapshot/snapshot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"

namespace emberd::shard {
namespace {

constexpr int64_t kBlockBytes = int64_t{1} << 20;
// Chunks that one job looks at: rows that were never touched cost little, but not nothing.
constexpr int64_t kMostChunks = int64_t{1} << 20;

int64_t BytesOf(const SnapshotRows& rows) {
  int64_t bytes = 0;
  for (const PooledArray<char>& array : rows.arrays) bytes += static_cast<int64_t>(array.size());
  return bytes;
}

// Copies rows of partition k, from `first` on, behind `done` rows of the arrays.
void CopyRows(const StackStore& store, int k, int64_t first, int64_t count, int64_t done,
              std::vector<PooledArray<char>>& arrays) {
  const int64_t row = k * store.rows_per_partition() + first;
  const auto copy = [&](size_t array, const char* from, int64_t row_bytes) {
    std::memcpy(arrays[array].data() + done * row_bytes, from + row * row_bytes, count * row_bytes);
  };
  copy(0, store.weights(), static_cast<int64_t>(store.row_bytes()));
  for (size_t s = 0; s < store.slots().size(); ++s) {
    const StackStore::Slot& slot = store.slots()[s];
    copy(s + 1, slot.memory.data(), slot.columns * static_cast<int64_t>(sizeof(float)));
  }
}

}  // namespace

class Snapshot::Part : public ChunkCopier {
 public:
  Part(Snapshot* snapshot, int stack, int k)
      : snapshot_(snapshot),
        stack(stack),
        k(k),
        store(*snapshot->stores_[stack]),
        cursor(store.changes(k).first()) {}

  void CopyBeforeWrite(int64_t chunk) override { snapshot_->Copy(*this, chunk); }

 private:
  Snapshot* const snapshot_;  // which the model's rows refer to only until End

 public:
  const int stack;
  const int k;
  StackStore& store;
  int64_t cursor;  // the reader's: the next chunk
};

Snapshot::Snapshot(std::vector<std::shared_ptr<Model>> models, std::vector<MemoryManager::Use> uses,
                   const SnapshotOptions& options, Executor* executor, BufferPool* pool)
    : models_(std::move(models)),
      uses_(std::move(uses)),
      options_(options),
      executor_(executor),
      pool_(pool) {
  for (const std::shared_ptr<Model>& model : models_) {
    for (int i = 0; i < model->stack_count(); ++i) {
      if (absl::c_linear_search(stores_, &model->stack(i))) continue;
      stores_.push_back(&model->stack(i));
      for (int k = 0; k < stores_.back()->partitions(); ++k) {
        parts_.push_back(std::make_shared<Part>(this, static_cast<int>(stores_.size()) - 1, k));
      }
    }
  }
}

std::vector<Job> Snapshot::BeginJobs() {
  std::vector<Job> jobs;
  for (const std::shared_ptr<Part>& part : parts_) {
    Job& job = jobs.emplace_back();
    job.strands = {&part->store.strand(part->k)};
    job.mode = Job::Mode::kWrite;
    job.run = [part, changed_only = options_.changed_only](int) {
      part->store.changes(part->k).Begin(changed_only, part);
    };
  }
  return jobs;
}

std::vector<Job> Snapshot::EndJobs(bool kept) {
  std::vector<Job> jobs;
  for (const std::shared_ptr<Part>& part : parts_) {
    Job& job = jobs.emplace_back();
    job.strands = {&part->store.strand(part->k)};
    job.mode = Job::Mode::kWrite;
    // Keeps the snapshot until no writer can know of it.
    job.run = [self = shared_from_this(), part, kept](int) {
      part->store.changes(part->k).End(part.get(), kept);
    };
  }
  return jobs;
}

std::vector<PooledArray<char>> Snapshot::MakeArrays(const StackStore& store, int64_t rows) const {
  std::vector<PooledArray<char>> arrays;
  arrays.emplace_back(*pool_, rows * store.row_bytes());
  for (const StackStore::Slot& slot : store.slots()) {
    arrays.emplace_back(*pool_, rows * slot.columns * sizeof(float));
  }
  return arrays;
}

void Snapshot::Copy(const Part& part, int64_t chunk) {
  // Rows without a value of their own are not part of a snapshot.
  if (!part.store.ChunkTouched(chunk)) return;
  const StackStore::LocalRows local = part.store.RowsOfChunk(part.k, chunk);
  const int64_t count = local.end - local.begin;
  const int64_t bytes = count * part.store.state_bytes();
  {
    absl::MutexLock lock(&mutex_);
    // One copy is always let in, or a small bound would stop updates for good.
    while (!cancelled_ && copied_bytes_ > 0 && copied_bytes_ + bytes > options_.copy_bytes) {
      changed_.Wait(&mutex_);
    }
    if (cancelled_) return;
    copied_bytes_ += bytes;
  }
  SnapshotRows rows{part.stack, part.k, {{local.begin, count}}, MakeArrays(part.store, count)};
  CopyRows(part.store, part.k, local.begin, count, 0, rows.arrays);
  absl::MutexLock lock(&mutex_);
  copies_.push_back(std::move(rows));
  changed_.SignalAll();
}

SnapshotRows Snapshot::ReadBlock(Part* part) {
  StackStore& store = part->store;
  RowChanges& changes = store.changes(part->k);
  const int64_t state_bytes = store.state_bytes();
  SnapshotRows rows{part->stack, part->k, {}, {}};
  int64_t count = 0;
  const int64_t end = std::min(changes.end(), part->cursor + kMostChunks);
  while (count * state_bytes < kBlockBytes) {
    const int64_t chunk = changes.TakePending(part, part->cursor, end);
    part->cursor = chunk < 0 ? end : chunk + 1;
    if (chunk < 0) break;
    if (!store.ChunkTouched(chunk)) continue;
    const StackStore::LocalRows local = store.RowsOfChunk(part->k, chunk);
    if (rows.runs.empty() || rows.runs.back().first + rows.runs.back().count != local.begin) {
      rows.runs.push_back({local.begin, 0});
    }
    rows.runs.back().count += local.end - local.begin;
    count += local.end - local.begin;
  }
  rows.arrays = MakeArrays(store, count);
  int64_t done = 0;
  for (const SnapshotRows::Run& run : rows.runs) {
    CopyRows(store, part->k, run.first, run.count, done, rows.arrays);
    done += run.count;
  }
  return rows;
}

void Snapshot::StartReading(Part* part) {
  Job job;
  job.strands = {&part->store.strand(part->k)};
  job.mode = Job::Mode::kRead;
  job.run = [this, self = shared_from_this(), part](int) {
    SnapshotRows rows = ReadBlock(part);
    absl::MutexLock lock(&mutex_);
    block_ = std::move(rows);
    reading_ = false;
    changed_.SignalAll();
  };
  executor_->Submit({std::move(job)});
}

std::optional<SnapshotRows> Snapshot::TakeBlock() {
  SnapshotRows rows = *std::exchange(block_, std::nullopt);
  const Part& part = *parts_[current_];
  if (!rows.runs.empty()) return rows;
  if (part.cursor < part.store.changes(part.k).end()) return std::nullopt;
  ++current_;
  return rows;
}

absl::StatusOr<std::optional<SnapshotRows>> Snapshot::Next() {
  while (true) {
    std::optional<SnapshotRows> rows;
    Part* to_read = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      while (!cancelled_ && copies_.empty() && reading_) changed_.Wait(&mutex_);
      if (cancelled_) return absl::CancelledError("the snapshot was cancelled");
      if (!copies_.empty()) {
        rows = std::move(copies_.front());
        copies_.pop_front();
        copied_bytes_ -= BytesOf(*rows);
        changed_.SignalAll();
      } else if (block_.has_value()) {
        rows = TakeBlock();
      } else if (current_ == parts_.size()) {
        return std::optional<SnapshotRows>();
      }
      // The next block is read while the caller is busy with these rows.
      if (!reading_ && !block_.has_value() && current_ < parts_.size()) {
        to_read = parts_[current_].get();
        reading_ = true;
      }
    }
    if (to_read != nullptr) StartReading(to_read);
    if (rows.has_value()) return rows;
  }
}

void Snapshot::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  changed_.SignalAll();
}

}  // namespace emberd::shard
