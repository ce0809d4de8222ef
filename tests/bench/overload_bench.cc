// What a cluster still does when ten times as many lookups come as it can answer: goodput against
// its peak, the requests that wait, and the time until it serves as before.
#include <iostream>
#include <memory>

#include "tests/bench/bench_report.h"
#include "tests/testing/overload.h"

namespace emberd::bench {
namespace overload_bench {

constexpr int kRepeats = 3;  // each has a row of its own: they differ more than a median tells

EMBERD_BENCHMARK(overload, argc, argv) {
  Report report(argc, argv);
  for (int i = 0; i < kRepeats; ++i) {
    auto cluster =
        testing::Cluster::Start({.shards = 2, .config = "budgets { client_requests: 1000000 }"});
    if (!cluster.ok()) {
      std::cerr << cluster.status() << "\n";
      return 1;
    }
    const auto result = testing::Overload(**cluster, absl::Seconds(8), absl::Seconds(1));
    if (!result.ok()) {
      std::cerr << result.status() << "\n";
      return 1;
    }
    const double sent = static_cast<double>(result->flood.sent);
    report.Add({"overload/goodput", result->goodput, "lookups/s", 1, 8192, result->peak});
    report.Add({"overload/refused", static_cast<double>(result->flood.refused), "requests", 1, 8192,
                sent});
    report.Add(
        {"overload/late", static_cast<double>(result->flood.late), "requests", 1, 8192, sent});
    report.Add({"overload/most_waiting", static_cast<double>(result->most_waiting), "requests", 1,
                8192, 0});
    report.Add({"overload/recovery", absl::ToDoubleSeconds(result->recovery), "s", 1, 8192, 0});
  }
  return report.Finish();
}

}  // namespace overload_bench
}  // namespace emberd::bench
