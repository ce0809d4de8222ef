// A lookup that costs a server far more than it costs to send, and what becomes of a cluster when
// ten times as many of them come as it can answer.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/testing/cluster.h"
#include "tests/testing/request_load.h"

namespace emberd::testing {

struct OverloadResult {
  double peak = 0;           // lookups per second that a few patient clients get
  LoadResult flood;          // ten times as many, each with a deadline
  double goodput = 0;        // of the flood, answered in time, per second of it
  int64_t most_waiting = 0;  // requests that waited for a thread at once
  absl::Duration recovery;   // from the flood's last request until lookups are served as before
  bool serves = false;       // five lookups in a row, after that
  int64_t resident_growth_kib = 0;  // of all processes
};

// The cluster has no other load. `deadline` is that of each request of the flood; both are longer
// on a machine that takes long for one.
absl::StatusOr<OverloadResult> Overload(Cluster& cluster, absl::Duration duration,
                                        absl::Duration deadline);

}  // namespace emberd::testing
