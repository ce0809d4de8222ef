// What `stats` and `top` show of a coordinator's statistics.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/rates.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::emberctl {

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
