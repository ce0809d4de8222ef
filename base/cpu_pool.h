// Threads that share the tasks of whoever has some.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace emberd {

// Thread-safe. ParallelFor allocates nothing.
class CpuPool {
 public:
  // `threads` counts the caller of ParallelFor too: threads - 1 are started.
  explicit CpuPool(int threads);
  ~CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  // Calls task(0) to task(tasks - 1), each once, on the caller's and the pool's threads; returns
  // when all are done.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t)> task);

 private:
  struct Job {
    absl::FunctionRef<void(int64_t)> task;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    int helpers = 0;  // workers inside; guarded by mutex_
    Job* after = nullptr;
  };

  static void Run(Job* job);
  void Work();
  Job* FirstUnfinished() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  Job* jobs_ ABSL_GUARDED_BY(mutex_) = nullptr;  // newest first
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar work_or_stop_;
  CondVar helper_left_;
  std::vector<std::thread> threads_;
};

}  // namespace emberd
