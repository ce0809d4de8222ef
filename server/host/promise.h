// What a callback brings, for a thread that waits for it.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/steady_time.h"

namespace emberd::host {

// T: a Status or StatusOr.
template <typename T>
class Promise {
 public:
  // The callback, to be called once. It may be the last to go.
  std::function<void(T)> Setter() const {
    return [state = state_](T value) {
      state->value = std::move(value);
      state->ready.Notify();
    };
  }
  // False: there is no value by then, by SteadyNow.
  bool WaitUntil(absl::Time deadline) const {
    return AwaitSteadily(state_->ready, deadline - SteadyNow());
  }
  T& Wait() {
    state_->ready.WaitForNotification();
    return state_->value;
  }

 private:
  struct State {
    absl::Notification ready;
    T value = absl::UnknownError("no answer");
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Calls begin(callback), and waits for what the callback gets.
template <typename T, typename Begin>
T WaitForAnswer(const Begin& begin) {
  Promise<T> promise;
  begin(promise.Setter());
  return std::move(promise.Wait());
}

}  // namespace emberd::host
