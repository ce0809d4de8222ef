#include "shard/executor.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace emberd::shard {

// A job on its way. Owned by nobody's container: deleted by the thread that runs its last chunk.
// All fields but `job` are guarded by the executor's mutex.
struct Work {
  Job job;
  int waiting = 0;     // strands that have not let it in
  int next_chunk = 0;  // chunks taken
  int finished = 0;    // chunks run
};

Executor::Executor(int threads) {
  for (int i = 0; i < std::max(threads, 1); ++i) threads_.emplace_back([this] { Loop(); });
}

Executor::~Executor() {
  {
    MutexLock lock(&mutex_);
    while (unfinished_ > 0) all_finished_.Wait(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Executor::Submit(std::vector<Job> jobs) {
  std::vector<std::unique_ptr<Work>> works;
  for (Job& job : jobs) {
    works.push_back(std::make_unique<Work>());
    works.back()->job = std::move(job);
  }
  MutexLock lock(&mutex_);
  for (std::unique_ptr<Work>& work : works) Enqueue(std::move(work));
}

void Executor::Enqueue(std::unique_ptr<Work> work) {
  ++unfinished_;
  Work* w = work.release();
  w->waiting = static_cast<int>(w->job.strands.size());
  for (Strand* strand : w->job.strands) strand->line_.push_back({w, false});
  if (w->waiting == 0) MakeReady(w);
  for (Strand* strand : w->job.strands) Grant(*strand);
}

void Executor::Grant(Strand& strand) {
  bool readers_only = true;
  for (Strand::Entry& entry : strand.line_) {
    const bool first = &entry == &strand.line_.front();
    const bool reader = entry.work->job.mode == Job::Mode::kRead;
    if (!first && !(readers_only && reader)) return;
    readers_only = readers_only && reader;
    if (entry.granted) continue;
    entry.granted = true;
    if (--entry.work->waiting == 0) MakeReady(entry.work);
  }
}

void Executor::LeaveLines(Work& work) {
  for (Strand* strand : work.job.strands) {
    std::deque<Strand::Entry>& line = strand->line_;
    line.erase(std::find_if(line.begin(), line.end(),
                            [&](const Strand::Entry& entry) { return entry.work == &work; }));
    Grant(*strand);
  }
}

void Executor::MakeReady(Work* work) {
  ready_.push_back(work);
  if (work->job.chunks == 1) {
    work_or_stop_.Signal();
  } else {
    work_or_stop_.SignalAll();
  }
}

int Executor::queued() const {
  MutexLock lock(&mutex_);
  int chunks = 0;
  for (const Work* work : ready_) chunks += work->job.chunks - work->next_chunk;
  return chunks;
}

void Executor::Loop() {
  mutex_.Lock();
  while (true) {
    while (ready_.empty() && !stopping_) work_or_stop_.Wait(&mutex_);
    if (ready_.empty()) break;
    Work* work = ready_.front();
    const int chunk = work->next_chunk++;
    if (work->next_chunk == work->job.chunks) ready_.pop_front();
    mutex_.Unlock();
    work->job.run(chunk);
    mutex_.Lock();
    if (++work->finished < work->job.chunks) continue;
    LeaveLines(*work);
    mutex_.Unlock();
    if (work->job.done) work->job.done();
    delete work;  // may free what the job kept alive: not under the mutex
    mutex_.Lock();
    if (--unfinished_ == 0) all_finished_.SignalAll();
  }
  mutex_.Unlock();
}

void Executor::ParallelFor(int count, const std::function<void(int)>& body) {
  struct State {
    std::atomic<int> next{0};
    std::atomic<int> left;
  };
  const auto state = std::make_shared<State>();
  state->left = count;
  // A helper that starts after the last index is taken does not touch `body`, which may be gone by
  // then.
  const auto take = [state, count, &body](int) {
    for (int i; (i = state->next.fetch_add(1)) < count;) {
      body(i);
      if (state->left.fetch_sub(1) == 1) state->left.notify_all();
    }
  };
  const int helpers = std::min(threads(), count) - 1;
  if (helpers > 0) {
    Job job;
    job.chunks = helpers;
    job.run = take;
    Submit({std::move(job)});
  }
  take(0);
  for (int left; (left = state->left.load()) > 0;) state->left.wait(left);
}

}  // namespace emberd::shard
