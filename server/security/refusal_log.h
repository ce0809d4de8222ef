// Says in the log who was turned away, without letting anyone fill the disk.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/ops/keyed_log.h"

namespace emberd::security {

// What was refused. Parts that the caller chose are cut to kMaxText bytes.
struct Refusal {
  static constexpr size_t kMaxText = 100;

  absl::string_view method;  // or page
  absl::string_view reason;  // says nothing about the token
  absl::string_view client;  // name of the token or of the certificate, or address; empty: unknown
  absl::string_view agent;   // what the caller says that it is; empty: nothing
};

// Thread-safe. One line per minute for the same refusal, with the number of those left out.
class RefusalLog {
 public:
  void Add(const Refusal& refusal);

 private:
  ops::KeyedLog log_{absl::Minutes(1)};
};

}  // namespace emberd::security
