// The last hour of a cluster, in steps that are small enough for a chart.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "server/status_page/figures.h"

namespace emberd::status_page {

// Not thread-safe.
class History {
 public:
  static constexpr int64_t kKeepMs = 3'600'000;
  static constexpr int64_t kFineMs = 300'000;    // the latest of it, as often as figures come
  static constexpr int64_t kCoarseMs = 5'000;    // what is older, this far apart
  static constexpr int64_t kLeastMs = 900;       // figures that come sooner make no point
  static constexpr int64_t kRatesMs = 2'000;     // rates are taken over this time, at least
  static constexpr int64_t kLatencyMs = 10'000;  // and latencies over this

  // Figures in the order of their time; the first of them must answer.
  void Add(ClusterFigures figures);

  const ClusterFigures& latest() const { return recent_.back(); }
  double LookupsPerSecond(size_t coordinator) const {
    return status_page::LookupsPerSecond(recent_, coordinator, kLatencyMs);
  }
  bool empty() const { return recent_.empty(); }

  // {"keys": ["lookups", ...], "points": [[time_ms, value or null, ...], ...]} with those after
  // `since_ms`, oldest first. Errors have keys of their own: "error UNAVAILABLE".
  std::string ToJson(int64_t since_ms = 0) const;

 private:
  void Push(Point point);

  RecentFigures recent_;      // of the last seconds
  std::deque<Point> coarse_;  // all older than `fine_`
  std::deque<Point> fine_;
};

}  // namespace emberd::status_page
