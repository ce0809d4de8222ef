// Compiled programs, batches that are prepared, results that stay on a coordinator, and plans of
// several programs in one call (client/PROGRAMS.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace emberd {
class PeriodicTask;
}  // namespace emberd

namespace emberd::client {

class Transport;

// A program, a batch or a result on a coordinator. It stays there, even if the client makes no
// calls, until the last pointer to it goes: then another thread gives it back, within about a
// second. What is left when the client goes is given back at once.
struct Kept {
  uint64_t handle = 0;
  int coordinator = 0;  // index in ClientOptions::addresses: the only one that knows the handle
};
using KeptPtr = std::shared_ptr<const Kept>;

struct ServiceAnswer {
  // The message, by the names of its fields; of ProgramService, those that are set.
  std::string json;
  // The data of its tensors. In `json` it is the place here, as a text of digits.
  std::vector<std::string> tensors;
  // The program, the batch, or of each result in turn what stays of it; null: nothing.
  std::vector<KeptPtr> kept;
};

// Thread-safe.
class Programs : public std::enable_shared_from_this<Programs> {
 public:
  explicit Programs(Transport* transport);
  ~Programs();
  // Gives everything back; to be called before the transport goes, after the last call.
  void End();

  // A method of ProgramService or AdminService by its name, "Execute"; INVALID_ARGUMENT for an
  // unknown one. `request` is its message as text proto or JSON. The data of a tensor there is its
  // place in `tensors`, as a text of digits:
  //   Call("PrepareBatch", absl::StrCat("program_handle: ", program->handle, " batch { features {",
  //        " feature: 'f' dense { ids { dtype: INT64 shape: 3 data: '0' } } } }"), {ids},
  //        &*program)
  // The client's id is filled in, and the sequence of updates that have none. `at`: the call goes
  // to the coordinator that keeps this; null: to any. UNAVAILABLE if that coordinator has gone:
  // compile again at another.
  absl::StatusOr<ServiceAnswer> Call(const std::string& method, const std::string& request,
                                     absl::Span<const std::string_view> tensors = {},
                                     const Kept* at = nullptr);

 private:
  struct AtCoordinator {
    int64_t kept = 0;
    std::vector<uint64_t> released;  // that it does not know of yet
  };
  KeptPtr Keep(uint64_t handle, int coordinator);
  void Release(const Kept& kept);
  // Tells coordinators what was released, and that this client is there.
  void Tell(bool end);

  Transport* const transport_;
  const std::string client_id_;
  std::atomic<uint64_t> updates_ = 0;
  absl::Mutex mutex_;
  std::map<int, AtCoordinator> coordinators_ ABSL_GUARDED_BY(mutex_);
  absl::Duration lease_ ABSL_GUARDED_BY(mutex_) = absl::Seconds(10);
  absl::Time renewed_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::unique_ptr<PeriodicTask> task_;  // from when something is kept; made under the mutex
};

}  // namespace emberd::client
