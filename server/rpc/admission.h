// How much a process takes on at once: requests, their bytes and those of what they produce, of all
// clients and of each.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/cluster.pb.h"
#include "server/rpc/memory_budget.h"

namespace emberd::rpc {

// Thread-safe. Costs one short lock a request, and atomic additions for bytes that come later.
class Admission {
 private:
  struct Client {
    int requests = 0;
    rpc::MemoryBudget budget;
    bool left = false;  // it is in left_

    bool Idle() const { return requests == 0 && budget.used() == 0; }
  };
  using Clients = std::map<std::string, Client>;
  // The same bytes of the process's budget and of the client's.
  struct Room {
    rpc::MemoryRoom process;
    rpc::MemoryRoom client;
  };

 public:
  // `budgets` is complete. `memory`: the process's budget, which others may take from as well; else
  // it has its own of budgets.in_flight_bytes.
  explicit Admission(const v1::BudgetConfig& budgets);
  Admission(const v1::BudgetConfig& budgets, rpc::MemoryBudget memory);

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
    // Bytes for what the request produces, `what` in errors. They are given back when the last
    // reference to the result goes, which may be after the grant, and after the Admission.
    absl::StatusOr<std::shared_ptr<const void>> Reserve(int64_t bytes, absl::string_view what);

   private:
    friend class Admission;
    Admission* admission_ = nullptr;
    Clients::iterator client_;
    Room room_;
  };
  // RESOURCE_EXHAUSTED names the budget that is used up, with the figures. `client`: see
  // security/callers.h.
  absl::StatusOr<Grant> Admit(const std::string& client, int64_t bytes);

  int64_t bytes() const { return budget_.used(); }
  int requests() const;

 private:
  absl::StatusOr<Room> TakeRoom(const Client& client, int64_t bytes, absl::string_view what) const;

  const rpc::MemoryBudget budget_;
  const int64_t max_client_bytes_;
  const int max_client_requests_;

  mutable absl::Mutex mutex_;
  Clients clients_ ABSL_GUARDED_BY(mutex_);  // those with requests, or with bytes
  // Those whose last request has gone before its answer; each request looks at one of them.
  std::deque<Clients::iterator> left_ ABSL_GUARDED_BY(mutex_);
  int requests_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::rpc
