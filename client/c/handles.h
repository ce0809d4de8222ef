// What stands behind the handles of emberd.h. Internal to the C interface.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/c/emberd.h"
#include "client/cpp/client.h"

namespace emberd::c {

// Runs `work`; what it throws becomes a status.
template <typename Work>
absl::Status Guarded(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("this process has no memory left for the request");
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("the client failed: ", error.what()));
  }
}

// The last that was heard of how far a call is.
class LastProgress {
 public:
  void Set(const client::CheckpointProgress& progress) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    progress_ = progress;
  }
  // None if it has been taken.
  std::optional<client::CheckpointProgress> Take() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return std::exchange(progress_, std::nullopt);
  }

 private:
  absl::Mutex mutex_;
  std::optional<client::CheckpointProgress> progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::c

struct emberd_error {
  absl::Status status;
  std::string message;
};

struct emberd_client {
  std::shared_ptr<emberd::client::Client> client;
};

struct emberd_model {
  std::shared_ptr<const emberd::client::Model> model;
  std::string json;
};

struct emberd_lookup {
  emberd::client::BatchHandle batch;
  std::vector<emberd::client::Activation> activations;
  absl::Span<const float> concat;  // of all of them, if they lie side by side
  emberd::client::BatchStatistics statistics;
  emberd::client::StepTimes times;
  int64_t step = -1;
  std::shared_ptr<const void> memory;
  absl::Mutex mutex;
  std::string json ABSL_GUARDED_BY(mutex);  // of the statistics, once somebody has asked
};

struct emberd_rows {
  emberd::client::RowValues rows;
};

struct emberd_text {
  std::string text;
};

struct emberd_stream {
  // Behind the stream, which has to go first.
  std::shared_ptr<emberd::client::Client> client;
  std::shared_ptr<emberd::client::TrainStream> stream;
  absl::Mutex mutex = {};
  // Ends of checkpoints that nobody has taken.
  std::deque<std::string> checkpoints ABSL_GUARDED_BY(mutex) = {};
};

struct emberd_answer {
  emberd::client::ServiceAnswer answer;
  absl::Mutex mutex = {};  // while something is taken
};

struct emberd_kept {
  emberd::client::KeptPtr kept;
};

struct emberd_floats {
  std::shared_ptr<float> memory;
};

struct emberd_lease {
  std::shared_ptr<std::atomic<bool>> released;  // null: nothing was held
};

// A task on a thread of the library, and then its result.
struct emberd_call {
 public:
  using Result =
      std::variant<std::monostate, std::unique_ptr<emberd_client>, std::unique_ptr<emberd_model>,
                   std::unique_ptr<emberd_lookup>, std::unique_ptr<emberd_rows>,
                   std::unique_ptr<emberd_text>, std::unique_ptr<emberd_stream>,
                   std::unique_ptr<emberd_answer>, emberd_update>;
  using Work = std::function<absl::StatusOr<Result>()>;

  // `begin` reads arguments and gives the work, which gives the result; a call of which one of them
  // fails ends with the error. `progress`, which may be null, is what the work tells meanwhile.
  static emberd_call* Begin(absl::FunctionRef<absl::StatusOr<Work>()> begin,
                            std::shared_ptr<emberd::c::LastProgress> progress = nullptr) noexcept;
  // Waits for the end.
  ~emberd_call() { ended_.WaitForNotification(); }

  bool Wait(absl::Duration timeout) { return emberd::AwaitSteadily(ended_, timeout); }
  // OK while it runs.
  absl::Status status() const { return ended_.HasBeenNotified() ? status_ : absl::OkStatus(); }
  // Null: it tells nothing.
  emberd::c::LastProgress* progress() { return progress_.get(); }
  // The result, if the call has ended with a T.
  template <typename T>
  T* Get() {
    return ended_.HasBeenNotified() ? std::get_if<T>(&result_) : nullptr;
  }
  template <typename T>
  T* Take() {
    absl::MutexLock lock(&take_mutex_);
    std::unique_ptr<T>* held = Get<std::unique_ptr<T>>();
    return held != nullptr ? held->release() : nullptr;
  }

 private:
  void Run(Work* work);

  std::shared_ptr<emberd::c::LastProgress> progress_;
  absl::Mutex take_mutex_;
  Result result_;
  absl::Status status_;
  absl::Notification ended_;  // from then on, the two above stay as they are
};

namespace emberd::c {

// Null for OK.
emberd_error* MakeError(const absl::Status& status) noexcept;
// Of what a caller means by `milliseconds`: negative is for ever.
absl::Duration Timeout(int64_t milliseconds);

}  // namespace emberd::c
