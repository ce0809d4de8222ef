// Statistics of one coordinator, and what happened between two of its answers; and what `stats` and
// `top` show of that.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/emberctl/output.h"
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

// ---- What is shown

// What a shard does, in a word or two, for tables of shards: "ok", "DOWN", "RECOVERING 43%", "NO
// CHANGES" (its log cannot be written or read).
Cell StateOf(const v1::ShardStatus& shard);
// OK, or why the shard does not do all that it should. UNAVAILABLE: it does not answer, or is
// recovering.
absl::Status CheckShard(const v1::ShardStatus& shard);

// What stands first.
enum class Order {
  kBusy,  // most of it done
  kSlow,  // longest waited for
  kName,  // as the server lists it
};

struct StatsViewOptions {
  bool per_second = true;  // else counts
  Order order = Order::kName;
  bool hide_idle = false;  // methods that were not called
};

// A few lines on the coordinator as a whole.
std::vector<CellLine> SummaryLines(const Rates& rates, const std::string& address);
// Methods, shards, stacks, stages, groups and hot rows; those that are empty are left out.
std::vector<Table> StatsTables(const Rates& rates, const StatsViewOptions& options);

// The same as JSON: counts of the time, what they are per second, and the state now.
Json StatsJson(const Rates& rates);

// One screen of `emberctl top`.
struct FrameOptions {
  Order order = Order::kBusy;
  bool colors = false;
  int columns = 0;   // 0: as many as it takes
  int rows = 0;      // the same
  std::string hint;  // the last line, if not empty
  int first = 0;     // lines to leave out at the top, because somebody has scrolled
};

// Lines that fit. Where there is too much, the last but the hint says how much is missing.
std::vector<std::string> TopFrame(const Rates& rates, const std::string& address,
                                  const FrameOptions& options);
// The largest `first` at which the frame is full.
int LastScroll(const Rates& rates, const std::string& address, const FrameOptions& options);

}  // namespace emberd::emberctl
