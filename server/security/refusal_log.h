// Says in the log who was turned away, without letting anyone fill the disk.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/ops/logging.h"

namespace emberd::security {

// What was refused. Parts that the caller chose are cut to kMaxText bytes.
struct Refusal {
  static constexpr size_t kMaxText = 100;

  absl::string_view method;  // or page
  absl::string_view reason;  // says nothing about the token
  absl::string_view client;  // name of the token, or address; empty: unknown
  absl::string_view agent;   // what the caller says that it is; empty: nothing
};

// Thread-safe. One line per minute for the same refusal, with the number of those left out.
class RefusalLog {
 public:
  // Beyond so many different ones, the others share one line per minute.
  static constexpr size_t kMaxKinds = 256;

  void Add(const Refusal& refusal);

 private:
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::unique_ptr<ops::RateLimitedLog>> logs_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::security
