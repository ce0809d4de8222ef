// Whether a coordinator takes what is new. Its process goes on either way.
#pragma once

#include <atomic>

#include "absl/status/status.h"

namespace emberd::server {

// Thread-safe.
class DrainSwitch {
 public:
  bool draining() const { return draining_.load(); }
  void Set(bool draining) { draining_.store(draining); }

 private:
  std::atomic<bool> draining_ = false;
};

// For what is new. Clients that know of another coordinator turn to it on this code.
inline absl::Status DrainingError() {
  return absl::UnavailableError("the coordinator is draining; turn to another one");
}

}  // namespace emberd::server
