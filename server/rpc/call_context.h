// What a request hands down to the calls that it makes: a deadline, its trace, and word of its
// cancellation.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace emberd::rpc {

// Thread-safe. Lives as long as its request.
class CallContext {
 public:
  // `trace`: see trace.h; sent along with every call, if not empty.
  explicit CallContext(absl::Time deadline, std::string trace = "")
      : deadline_(deadline), trace_(std::move(trace)) {}
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;

  absl::Time deadline() const { return deadline_; }
  const std::string& trace() const { return trace_; }

  bool cancelled() const {
    absl::MutexLock lock(&mutex_);
    return cancelled_;
  }

  // Runs every watcher, once.
  void Cancel() {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    for (auto& [id, watcher] : watchers_) watcher();
    watchers_.clear();
  }

 private:
  friend class CancelWatch;

  const absl::Time deadline_;
  const std::string trace_;
  mutable absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::function<void()>> watchers_ ABSL_GUARDED_BY(mutex_);
};

// Calls `watcher` when the context is cancelled (at once if it has been), until this object goes.
// The watcher runs under the context's lock: it must be short and must not touch the context.
class CancelWatch {
 public:
  CancelWatch(CallContext* context, std::function<void()> watcher) : context_(context) {
    absl::MutexLock lock(&context_->mutex_);
    if (context_->cancelled_) {
      watcher();
    } else {
      id_ = context_->next_id_++;
      context_->watchers_.emplace(id_, std::move(watcher));
    }
  }
  ~CancelWatch() {
    absl::MutexLock lock(&context_->mutex_);
    context_->watchers_.erase(id_);
  }
  CancelWatch(const CancelWatch&) = delete;
  CancelWatch& operator=(const CancelWatch&) = delete;

 private:
  CallContext* const context_;
  int64_t id_ = -1;
};

}  // namespace emberd::rpc
