// Compiled programs by key and by handle. A key is compiled by one call at a time; each call that
// succeeds takes a reference. The newest programs stay even without references. An older one stays
// until its last reference is given back, or until nobody has used it for the lease; when it is
// compiled again, it is one of the newest.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/values.h"
#include "server/step/served_model.h"

namespace emberd::coordinator {

// A compiled program: a spec that was completed, the sizes of its buffers, and the model with its
// limits.
//
// Thread-safe.
class Program {
 public:
  // `spec` is complete, for `model` (null: ELEMENTWISE); `key` is theirs. RESOURCE_EXHAUSTED: the
  // program allows more than its buffers hold. `cpu` must outlive the program.
  static absl::StatusOr<ProgramPtr> Compile(v1::ProgramSpec spec, const std::string& key,
                                            const step::ServedModelPtr& model, CpuPool* cpu);

  const v1::ProgramSpec& spec() const { return info_.spec(); }
  v1::ProgramSpec::Kind kind() const { return info_.spec().kind(); }
  const std::string& key() const { return info_.fingerprint(); }
  uint64_t model_id() const { return info_.model_id(); }
  // What Compile answers, but for the handle and `cached`.
  const v1::CompileResponse& info() const { return info_; }

  // The model as it is now, with the limits of a LOOKUP. FAILED_PRECONDITION if its plan is not the
  // one that the program was compiled for.
  absl::StatusOr<step::ServedModelPtr> ModelFor(const step::ServedModelPtr& now) const;

 private:
  Program() = default;
  step::ServedModelPtr WithLimits(const step::ServedModel& model) const;

  v1::CompileResponse info_;
  uint64_t plan_fingerprint_ = 0;
  CpuPool* cpu_ = nullptr;
  mutable absl::Mutex mutex_;
  mutable step::ServedModelPtr model_ ABSL_GUARDED_BY(mutex_);  // of the last call
};

// Thread-safe.
class ProgramCache {
 public:
  struct Options {
    int capacity = 1024;  // at least 1: the newest program always stays
    absl::Duration lease;
    std::function<uint64_t()> new_handle;
  };
  explicit ProgramCache(Options options) : options_(std::move(options)) {}

  struct Compiled {
    ProgramPtr program;
    uint64_t handle = 0;
    bool cached = false;
  };
  using Factory = std::function<absl::StatusOr<ProgramPtr>()>;
  // Calls `factory`, outside of any lock, unless the program is there; while another call does so,
  // waits for it and takes what comes of it, good or bad.
  absl::StatusOr<Compiled> Compile(const std::string& key, const Factory& factory);

  absl::StatusOr<ProgramPtr> Find(uint64_t handle);
  // The same, also for a client's own handle.
  absl::StatusOr<ProgramPtr> Find(uint64_t handle, Handles* handles);
  // Whether references may be given back: one for each time that a handle is named. NOT_FOUND names
  // the first handle that has too few.
  absl::Status CheckRelease(const std::vector<uint64_t>& handles);
  // Gives references back, all or none.
  absl::Status Release(const std::vector<uint64_t>& handles);
  // Forgets programs outside of the newest ones that were not used for the lease.
  void Sweep(absl::Time now);

  int64_t count() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(by_handle_.size());
  }

 private:
  struct Entry {
    std::string key;
    uint64_t handle = 0;
    bool done = false;
    absl::Status status;
    ProgramPtr program;
    int64_t references = 0;
    bool newest = false;  // it is in newest_, at `place`
    std::list<Entry*>::iterator place;
    absl::Time used = SteadyNow();
  };
  using EntryPtr = std::shared_ptr<Entry>;

  void Take(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckReleaseLocked(const std::vector<uint64_t>& handles) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  absl::CondVar done_;
  absl::flat_hash_map<std::string, EntryPtr> by_key_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, EntryPtr> by_handle_ ABSL_GUARDED_BY(mutex_);
  std::list<Entry*> newest_ ABSL_GUARDED_BY(mutex_);  // the newest first
};

}  // namespace emberd::coordinator
