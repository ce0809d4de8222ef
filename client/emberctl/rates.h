// Statistics of one coordinator, and what happened between two of its answers, for `stats` and
// `top`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/emberctl/session.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::emberctl {

// Of latencies; 0 without any.
struct Latency {
  int64_t count = 0;
  double sum = 0;  // seconds
  double p50 = 0;
  double p99 = 0;
};
struct MethodRates {
  std::string method;
  int64_t errors = 0;
  Latency latency;
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
};
struct StageRates {
  std::string stage;
  Latency latency;
};
struct ModelRates {
  std::string model;
  int64_t examples = 0;
};
struct StackRates {
  v1::StackStats now;  // limits, and the largest needs since the start
  int64_t batches = 0;
  int64_t ids = 0;
  int64_t unique_ids = 0;
  int64_t dropped_ids = 0;
};
struct ShardRates {
  v1::ShardStatus now;
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
};
struct GroupRates {
  std::string model;
  std::string group;
  int64_t updates = 0;
  int64_t failures = 0;
  double wait_seconds = 0;
  std::string last_rank;  // for which the others waited most often; empty: there was no waiting
  double last_share = 0;  // of the waits, that rank's
};

struct Rates {
  v1::GetStatsResponse now;
  double seconds = 0;  // > 0
  std::vector<MethodRates> methods;
  std::vector<StageRates> stages;
  std::vector<ModelRates> models;
  std::vector<StackRates> stacks;
  std::vector<ShardRates> shards;
  std::vector<GroupRates> groups;
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

// Stays with the coordinator that answered last, and turns to the next address when it does not.
class StatsSource {
 public:
  StatsSource(const Session& session, int hot_rows);

  // The error of the last address if none answers.
  absl::StatusOr<v1::GetStatsResponse> Fetch();
  // Whose answer it was.
  const std::string& address() const { return session_.addresses[current_]; }

 private:
  const Session& session_;
  const int hot_rows_;
  std::vector<std::unique_ptr<Session>> coordinators_;  // by address
  size_t current_ = 0;
};

}  // namespace emberd::emberctl
