// A compiled program: a spec that was completed, the sizes of its buffers, and the model with its
// limits.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/cpu_pool.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/served_model.h"

namespace emberd::server {

// Thread-safe.
class Program {
 public:
  // `spec` is complete, for `model` (null: ELEMENTWISE); `key` is theirs. RESOURCE_EXHAUSTED: the
  // program allows more than its buffers hold. `cpu` must outlive the program.
  static absl::StatusOr<std::shared_ptr<const Program>> Compile(
      v1::ProgramSpec spec, const std::string& key, const std::shared_ptr<const ServedModel>& model,
      CpuPool* cpu);

  const v1::ProgramSpec& spec() const { return info_.spec(); }
  v1::ProgramSpec::Kind kind() const { return info_.spec().kind(); }
  const std::string& key() const { return info_.fingerprint(); }
  uint64_t model_id() const { return info_.model_id(); }
  // What Compile answers, but for the handle and `cached`.
  const v1::CompileResponse& info() const { return info_; }

  // The model as it is now, with the limits of a LOOKUP. FAILED_PRECONDITION if its plan is not the
  // one that the program was compiled for.
  absl::StatusOr<std::shared_ptr<const ServedModel>> ModelFor(
      const std::shared_ptr<const ServedModel>& now) const;

 private:
  Program() = default;
  std::shared_ptr<const ServedModel> WithLimits(const ServedModel& model) const;

  v1::CompileResponse info_;
  uint64_t plan_fingerprint_ = 0;
  CpuPool* cpu_ = nullptr;
  mutable absl::Mutex mutex_;
  mutable std::shared_ptr<const ServedModel> model_ ABSL_GUARDED_BY(mutex_);  // of the last call
};

}  // namespace emberd::server
