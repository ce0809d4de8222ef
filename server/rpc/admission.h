// How much a process takes on at once: requests and their bytes, of all clients and of each.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::server {

// Thread-safe. Costs one short lock a request.
class Admission {
 private:
  struct Client {
    int requests = 0;
    int64_t bytes = 0;
  };
  using Clients = std::map<std::string, Client>;

 public:
  // `budgets` is complete.
  explicit Admission(const v1::BudgetConfig& budgets);

  // What one request holds, given back when it goes. Not thread-safe. The Admission outlives it.
  class Grant {
   public:
    Grant() = default;
    Grant(Grant&& other) noexcept { *this = std::move(other); }
    Grant& operator=(Grant&& other) noexcept;
    ~Grant();

    // RESOURCE_EXHAUSTED with the figures if a budget does not allow it.
    absl::Status AddBytes(int64_t bytes);
    void ReleaseBytes(int64_t bytes);

   private:
    friend class Admission;
    Admission* admission_ = nullptr;
    Clients::iterator client_;
    int64_t bytes_ = 0;
  };
  // RESOURCE_EXHAUSTED names the budget that is used up, with the figures. `client`: see
  // security/callers.h.
  absl::StatusOr<Grant> Admit(const std::string& client, int64_t bytes);

  int64_t bytes() const;
  int requests() const;

 private:
  absl::Status TakeBytes(Clients::iterator client, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_bytes_;
  const int64_t max_client_bytes_;
  const int max_client_requests_;

  mutable absl::Mutex mutex_;
  Clients clients_ ABSL_GUARDED_BY(mutex_);  // those with requests
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int requests_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::server
