#include "shard/executor.h"

#include <algorithm>
#include <utility>

namespace emberd::shard {

// A job on its way. Finish deletes it.
struct Work {
  Job job;
  int waiting = 0;  // strands that have not let it in; guarded by the executor's mutex
};

Executor::~Executor() {
  MutexLock lock(&mutex_);
  while (unfinished_ > 0) all_finished_.Wait(&mutex_);
}

void Executor::Submit(std::vector<Job> jobs) {
  std::vector<std::unique_ptr<Work>> works;
  for (Job& job : jobs) {
    works.push_back(std::make_unique<Work>());
    works.back()->job = std::move(job);
  }
  Works here;
  {
    MutexLock lock(&mutex_);
    for (std::unique_ptr<Work>& work : works) Enqueue(std::move(work), &here);
  }
  for (Work* work : here) {
    for (int chunk = 0; chunk < work->job.chunks; ++chunk) work->job.run(chunk);
    Finish(work);
  }
}

void Executor::Enqueue(std::unique_ptr<Work> work, Works* here) {
  ++unfinished_;
  Work* w = work.release();
  w->waiting = static_cast<int>(w->job.strands.size());
  for (Strand* strand : w->job.strands) strand->line_.push_back({w, false});
  if (w->waiting == 0) MakeReady(w, here);
  for (Strand* strand : w->job.strands) Grant(*strand, here);
}

void Executor::Grant(Strand& strand, Works* here) {
  bool readers_only = true;
  for (Strand::Entry& entry : strand.line_) {
    const bool first = &entry == &strand.line_.front();
    const bool reader = entry.work->job.mode == Job::Mode::kRead;
    if (!first && !(readers_only && reader)) return;
    readers_only = readers_only && reader;
    if (entry.granted) continue;
    entry.granted = true;
    if (--entry.work->waiting == 0) MakeReady(entry.work, here);
  }
}

void Executor::LeaveLines(Work& work) {
  for (Strand* strand : work.job.strands) {
    std::deque<Strand::Entry>& line = strand->line_;
    line.erase(std::find_if(line.begin(), line.end(),
                            [&](const Strand::Entry& entry) { return entry.work == &work; }));
    Grant(*strand, nullptr);
  }
}

void Executor::MakeReady(Work* work, Works* here) {
  if (here != nullptr && work->job.tiny) {
    here->push_back(work);
    return;
  }
  queued_ += work->job.chunks;
  const auto run = [this, work](int chunk) {
    --queued_;
    work->job.run(chunk);
  };
  cpu_->Submit({work->job.chunks, run, [this, work] { Finish(work); }});
}

void Executor::Finish(Work* work) {
  {
    MutexLock lock(&mutex_);
    LeaveLines(*work);
  }
  if (work->job.done) work->job.done();
  delete work;  // may free what the job kept alive: not under the mutex
  MutexLock lock(&mutex_);
  if (--unfinished_ == 0) all_finished_.SignalAll();
}

}  // namespace emberd::shard
