// What the coordinators of a cluster say of themselves, and what lies between two such answers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::status_page {

// One coordinator. The one that serves the page comes first, and it alone tells about shards.
struct CoordinatorFigures {
  std::string name;                 // "coordinator-0"
  std::string address = {};         // of gRPC
  std::string http_address = {};    // of its own page; empty: none
  absl::Status status = {};         // why it does not answer
  v1::GetStatsResponse stats = {};  // if it does
};
using ClusterFigures = std::vector<CoordinatorFigures>;

// The sum over all coordinators that answer; times, shards and whether it is draining are those of
// the first.
v1::GetStatsResponse Merge(const ClusterFigures& figures);

// What charts show, each a rate per second or a number of seconds.
enum class Value {
  kLookups,
  kUpdates,
  kRowsGathered,
  kRowsUpdated,
  kBytesReceived,
  kBytesSent,
  kLookupMedian,
  kLookup99,
  kApplyMedian,
  kApply99,
  kErrors,
};
inline constexpr int kValues = 11;
const char* NameOf(Value value);

// All values at one time; NaN: unknown.
struct Point {
  int64_t time_ms = 0;
  std::array<double, kValues> values = {};
  std::vector<std::pair<std::string, double>> errors = {};  // by code, where there were any

  double& at(Value value) { return values[static_cast<size_t>(value)]; }
  double at(Value value) const { return values[static_cast<size_t>(value)]; }
};

// A point where nothing is known: a gap in a line.
Point Gap(int64_t time_ms);

// Figures of a few seconds, oldest first. What a coordinator or a shard counted before it was
// started anew, or while it did not answer, never counts.
using RecentFigures = std::deque<ClusterFigures>;
// Of the latest: rates over `rates_ms` at least, latencies over `latencies_ms`, and where a
// coordinator has not answered for so long, over as long as it has.
Point Latest(const RecentFigures& recent, int64_t rates_ms, int64_t latencies_ms);
// Lookups per second of coordinator `index` of the latest; 0 if it has not answered twice.
double LookupsPerSecond(const RecentFigures& recent, size_t index, int64_t over_ms);

// The value below which a share `q` of the observations lies that `now` has and `before` has not;
// NaN: there are none. Inside a bucket they are taken to be spread evenly.
double Quantile(double q, const v1::Distribution& now, const v1::Distribution& before);

}  // namespace emberd::status_page
