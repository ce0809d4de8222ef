#include "client/demo/monitor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::demo {

void ShardHistory::Add(const client::ClusterStatus& status, absl::Time now,
                       std::vector<std::string>* events) {
  const double seconds = absl::ToDoubleSeconds(now - last_);
  last_ = now;
  traffic_.resize(std::max(traffic_.size(), status.shards.size()));
  seen_.resize(traffic_.size());
  for (size_t i = 0; i < status.shards.size(); ++i) {
    const client::ShardStatus& shard = status.shards[i];
    ShardTraffic& traffic = traffic_[i];
    const std::string name = absl::StrCat("shard ", shard.index, " (", shard.address, ")");
    if (traffic.reachable != shard.reachable) {
      events->push_back(shard.reachable ? absl::StrCat(name, " answers again")
                                        : absl::StrCat(name, " does not answer: ", shard.error));
    }
    traffic.reachable = shard.reachable;
    traffic.rows_per_second = 0;
    if (!shard.reachable) continue;
    client::ShardStatus& before = seen_[i];
    if (before.incarnation != shard.incarnation) {
      if (before.incarnation != 0) {
        ++traffic.restarts;
        events->push_back(
            absl::StrCat(name, " has restarted: its rows are at their initial values"));
      }
      before = {};  // counts begin anew
    }
    const int64_t gathered = shard.rows_gathered - before.rows_gathered;
    const int64_t updated = shard.rows_updated - before.rows_updated;
    traffic.rows_gathered += gathered;
    traffic.rows_updated += updated;
    if (seconds > 0) traffic.rows_per_second = static_cast<double>(gathered + updated) / seconds;
    before = shard;
  }
}

Monitor::Monitor(std::function<absl::StatusOr<client::ClusterStatus>()> get_status)
    : get_status_(std::move(get_status)), thread_([this] { Run(); }) {}

Monitor::~Monitor() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Monitor::Run() {
  while (true) {
    Ask();
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&stop_), absl::Seconds(1))) return;
  }
}

void Monitor::Ask() {
  const absl::StatusOr<client::ClusterStatus> status = get_status_();
  absl::MutexLock lock(&mutex_);
  if (status.ok()) {
    history_.Add(*status, absl::Now(), &events_);
  } else if (!failing_) {
    events_.push_back(
        absl::StrCat("the coordinator does not answer: ", status.status().ToString()));
  }
  if (status.ok() && failing_) events_.push_back("the coordinator answers again");
  failing_ = !status.ok();
}

std::vector<ShardTraffic> Monitor::Traffic() const {
  absl::MutexLock lock(&mutex_);
  return history_.traffic();
}

std::vector<std::string> Monitor::TakeEvents() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(events_, {});
}

int Monitor::Restarts() const {
  absl::MutexLock lock(&mutex_);
  int restarts = 0;
  for (const ShardTraffic& traffic : history_.traffic()) restarts += traffic.restarts;
  return restarts;
}

}  // namespace emberd::demo
