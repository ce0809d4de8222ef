// The rows of models as they were at one moment, read while training goes on.
//
// The moment is that of Engine::StartSnapshot, in the order in which updates were submitted. From
// then on rows leave the snapshot in one of two ways: its reader takes them, a block after another,
// or somebody is about to change them and their values are copied first. Copies are bounded; over
// the bound, whoever wants to change rows waits for the reader. So the reader must not wait for
// updates in turn: it takes copies before anything else.
// See docs/checkpoint.md.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "shard/store/model.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {

struct SnapshotOptions {
  bool changed_only = false;  // since the newest snapshot that was kept
  int64_t copy_bytes = 0;     // of rows that change before they are read
};

// Rows of one partition of one stack.
struct SnapshotRows {
  struct Run {
    int64_t first = 0;  // local row
    int64_t count = 0;
  };
  int stack = 0;          // of Snapshot::stores
  int k = 0;              // the shard's k-th partition
  std::vector<Run> runs;  // none: all rows of the partition have been given
  // Weights as they are stored, then each slot: the runs' rows, run after run.
  std::vector<PooledArray<char>> arrays;
};

// Thread-safe, but for Next.
class Snapshot : public std::enable_shared_from_this<Snapshot> {
 public:
  // `executor` and `pool` must outlive it.
  Snapshot(std::vector<std::shared_ptr<Model>> models, std::vector<MemoryManager::Use> uses,
           const SnapshotOptions& options, Executor* executor, BufferPool* pool);

  const std::vector<std::shared_ptr<Model>>& models() const { return models_; }
  // Their stacks: those of the first model, and then what the others have besides.
  const std::vector<StackStore*>& stores() const { return stores_; }

  // The next rows, of any partition; nothing after the last ones. Every partition ends with an
  // empty run list. Blocks. CANCELLED after Cancel.
  absl::StatusOr<std::optional<SnapshotRows>> Next();
  // Gives the snapshot up: nobody waits for it any more.
  void Cancel();

 private:
  friend class Engine;
  class Part;

  // The jobs that fix the moment, and those that end it.
  std::vector<Job> BeginJobs();
  std::vector<Job> EndJobs(bool kept);

  std::vector<PooledArray<char>> MakeArrays(const StackStore& store, int64_t rows) const;
  void Copy(const Part& part, int64_t chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads on in a partition, in a job that holds its strand.
  void StartReading(Part* part);
  SnapshotRows ReadBlock(Part* part);
  // What was read; nothing if that was only a look at rows that nobody has touched.
  std::optional<SnapshotRows> TakeBlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<std::shared_ptr<Model>> models_;
  const std::vector<MemoryManager::Use> uses_;
  std::vector<StackStore*> stores_;
  const SnapshotOptions options_;
  Executor* const executor_;
  BufferPool* const pool_;
  std::vector<std::shared_ptr<Part>> parts_;  // by stack, then partition
  size_t current_ = 0;                        // the part that is being read

  absl::Mutex mutex_;
  absl::CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<SnapshotRows> block_ ABSL_GUARDED_BY(mutex_);
  std::deque<SnapshotRows> copies_ ABSL_GUARDED_BY(mutex_);
  int64_t copied_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::shard
