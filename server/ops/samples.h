// How long calls took lately: the newest samples of each kind, with exact percentiles of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::ops {

// Thread-safe.
class Samples {
 public:
  static constexpr size_t kNewest = 1024;  // samples of each kind that are kept

  void Add(std::string_view name, double seconds);

  // Kinds whose complete name the RE2 expression matches, by name; empty: all. INVALID_ARGUMENT if
  // it is no expression.
  absl::StatusOr<v1::GetMetricsResponse> Get(const std::string& regex) const;

 private:
  struct Window {
    std::vector<double> values;  // a ring, once there are kNewest
    int64_t total = 0;
  };
  mutable absl::Mutex mutex_;
  std::map<std::string, Window, std::less<>> windows_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::ops
