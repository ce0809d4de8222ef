// Statistics of one coordinator, and what happened between two of its answers, for `stats` and
// `top`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/emberctl/session.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::emberctl {

struct Rates {
  // The counts are those of some time: of latencies, calls, examples, ids, rows and updates. All
  // else is as it was at its end.
  v1::GetStatsResponse stats;
  double seconds = 0;        // > 0
  bool since_start = false;  // that time; each shard counts from its own start then

  // In which the counts of a shard came together.
  double SecondsOf(const v1::ShardStatus& shard) const;
};

// Since the coordinator started.
Rates TotalsOf(const v1::GetStatsResponse& now);
// `before` is an earlier answer of the same coordinator. What has restarted since counts from its
// start.
Rates RatesBetween(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now);
// Whether both come from one life of a coordinator, as far as their clocks tell.
bool SameLife(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now);

// The value below which `fraction` of the observations lie, evenly spread over each bucket; 0
// without any. In the last, infinite bucket: its lower bound.
double Quantile(const v1::Distribution& distribution, double fraction);
// Calls that did not end with OK.
int64_t Errors(const v1::MethodStats& method);
// The rank for which the others waited most often, and its share of the waits. Empty: there was no
// waiting.
std::pair<std::string, double> LastRank(const v1::GroupStats& group);

// Rates from one answer to the next. Stays with the coordinator that answered last, and turns to
// the next address when it does not.
class Watch {
 public:
  Watch(const Session& session, int hot_rows);

  // Since the last call that was answered; since the start, if there was none or another
  // coordinator, or another life of it, has answered. The error of the last address if none
  // answers.
  absl::StatusOr<Rates> Next();
  // Of the last answer.
  bool since_start() const { return since_start_; }
  const std::string& address() const { return last_address_; }

 private:
  absl::StatusOr<v1::GetStatsResponse> Fetch();

  const Session& session_;
  const int hot_rows_;
  std::vector<std::unique_ptr<Session>> coordinators_;  // by address
  size_t current_ = 0;
  std::optional<v1::GetStatsResponse> last_;
  std::string last_address_;
  bool since_start_ = true;
};

}  // namespace emberd::emberctl
