// What a cluster still does when ten times as many lookups come as it can answer: goodput against
// its peak, the requests that wait, and the time until it serves as before. Fails if goodput or
// recovery are not what is promised.
#include <iostream>
#include <memory>

#include "tests/bench/bench_report.h"
#include "tests/testing/overload.h"

namespace emberd::bench {
namespace {

constexpr int kRepeats = 3;  // each has a row of its own: they differ more than a median tells
constexpr double kLeastGoodput = 0.8;  // of the peak
constexpr absl::Duration kRecoversWithin = absl::Seconds(2);

// Whether a round is as good as promised; says on stderr what is not.
bool KeepsPromises(const testing::OverloadResult& result, int round) {
  const bool serves = result.goodput >= kLeastGoodput * result.peak;
  const bool recovers = result.recovery < kRecoversWithin;
  if (!serves) {
    std::cerr << "round " << round << ": goodput is " << result.goodput << " lookups/s; at least "
              << kLeastGoodput * result.peak << " are promised at a peak of " << result.peak
              << "\n";
  }
  if (!recovers) {
    std::cerr << "round " << round << ": recovered after " << result.recovery << "; less than "
              << kRecoversWithin << " is promised\n";
  }
  return serves && recovers;
}

int Main(int argc, char** argv) {
  Report report(argc, argv);
  bool kept = true;
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
    report.Add({"overload/goodput", result->goodput, "lookups/s", 1, 4096, result->peak});
    report.Add({"overload/refused", static_cast<double>(result->flood.refused), "requests", 1, 4096,
                sent});
    report.Add(
        {"overload/late", static_cast<double>(result->flood.late), "requests", 1, 4096, sent});
    report.Add({"overload/most_waiting", static_cast<double>(result->most_waiting), "requests", 1,
                1024, 0});
    report.Add({"overload/recovery", absl::ToDoubleSeconds(result->recovery), "s", 1, 4096, 0});
    kept = KeepsPromises(*result, i + 1) && kept;
  }
  const int status = report.Finish();
  return kept ? status : 1;
}

}  // namespace
}  // namespace emberd::bench

int main(int argc, char** argv) { return emberd::bench::Main(argc, argv); }
