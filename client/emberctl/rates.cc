#include "client/emberctl/rates.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace emberd::emberctl {

namespace {

// Counts only grow, except where their process has restarted.
int64_t Growth(int64_t before, int64_t now) { return now >= before ? now - before : now; }

v1::Distribution Growth(const v1::Distribution& before, const v1::Distribution& now) {
  if (before.count() > now.count() || before.buckets_size() != now.buckets_size()) return now;
  v1::Distribution growth = now;
  growth.set_count(now.count() - before.count());
  growth.set_sum(std::max(now.sum() - before.sum(), 0.0));
  for (int i = 0; i < now.buckets_size(); ++i) {
    growth.mutable_buckets(i)->set_count(Growth(before.buckets(i).count(), now.buckets(i).count()));
  }
  return growth;
}

Latency LatencyOf(const v1::Distribution& distribution) {
  return {distribution.count(), distribution.sum(), Quantile(distribution, 0.5),
          Quantile(distribution, 0.99)};
}

// The element of `all` that `same` holds for, or an empty one.
template <typename Element, typename Same>
const Element& FindOrEmpty(const google::protobuf::RepeatedPtrField<Element>& all,
                           const Same& same) {
  const auto found = std::find_if(all.begin(), all.end(), same);
  return found == all.end() ? Element::default_instance() : *found;
}

int64_t Errors(const v1::MethodStats& method) {
  int64_t errors = 0;
  for (const auto& [code, count] : method.codes()) {
    if (code != "OK") errors += count;
  }
  return errors;
}

MethodRates Between(const v1::MethodStats& before, const v1::MethodStats& now) {
  MethodRates rates;
  rates.method = now.method();
  rates.errors = Growth(Errors(before), Errors(now));
  rates.latency = LatencyOf(Growth(before.seconds(), now.seconds()));
  rates.request_bytes = Growth(before.request_bytes(), now.request_bytes());
  rates.response_bytes = Growth(before.response_bytes(), now.response_bytes());
  return rates;
}

StackRates Between(const v1::StackStats& before, const v1::StackStats& now) {
  StackRates rates;
  rates.now = now;
  rates.batches = Growth(before.batches(), now.batches());
  rates.ids = Growth(before.ids(), now.ids());
  rates.unique_ids = Growth(before.unique_ids(), now.unique_ids());
  rates.dropped_ids = Growth(before.dropped_ids(), now.dropped_ids());
  return rates;
}

ShardRates Between(const v1::ShardStatus& before, const v1::ShardStatus& now) {
  ShardRates rates;
  rates.now = now;
  // Of one that did not answer then, nobody knows what is new.
  const bool listed = !before.address().empty();
  if (!now.reachable() || (listed && !before.reachable())) return rates;
  const bool same = before.incarnation() == now.incarnation();
  rates.rows_gathered = Growth(same ? before.rows_gathered() : 0, now.rows_gathered());
  rates.rows_updated = Growth(same ? before.rows_updated() : 0, now.rows_updated());
  return rates;
}

GroupRates Between(const v1::GroupStats& before, const v1::GroupStats& now) {
  GroupRates rates;
  rates.model = now.model();
  rates.group = now.group();
  rates.updates = Growth(before.updates(), now.updates());
  rates.failures = Growth(before.failures(), now.failures());
  rates.wait_seconds = now.wait_seconds() >= before.wait_seconds()
                           ? now.wait_seconds() - before.wait_seconds()
                           : now.wait_seconds();
  int64_t all = 0, most = 0;
  for (const auto& [rank, count] : now.last_arrivals()) {
    const auto then = before.last_arrivals().find(rank);
    const int64_t more = Growth(then == before.last_arrivals().end() ? 0 : then->second, count);
    all += more;
    if (more == 0 || more < most || (more == most && rank > rates.last_rank)) continue;
    most = more;
    rates.last_rank = rank;
  }
  if (all > 0) rates.last_share = static_cast<double>(most) / static_cast<double>(all);
  return rates;
}

Rates Between(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now, double seconds) {
  Rates rates;
  rates.now = now;
  rates.seconds = std::max(seconds, 1e-3);
  for (const auto& method : now.methods()) {
    rates.methods.push_back(
        Between(FindOrEmpty(before.methods(),
                            [&](const auto& then) { return then.method() == method.method(); }),
                method));
  }
  for (const auto& stage : now.stages()) {
    const auto& then = FindOrEmpty(before.stages(),
                                   [&](const auto& then) { return then.stage() == stage.stage(); });
    rates.stages.push_back({stage.stage(), LatencyOf(Growth(then.seconds(), stage.seconds()))});
  }
  for (const auto& model : now.models()) {
    const auto& then = FindOrEmpty(before.models(),
                                   [&](const auto& then) { return then.model() == model.model(); });
    rates.models.push_back({model.model(), Growth(then.examples(), model.examples())});
  }
  for (const auto& stack : now.stacks()) {
    rates.stacks.push_back(Between(FindOrEmpty(before.stacks(),
                                               [&](const auto& then) {
                                                 return then.model() == stack.model() &&
                                                        then.stack() == stack.stack();
                                               }),
                                   stack));
  }
  for (const auto& shard : now.shards()) {
    rates.shards.push_back(Between(FindOrEmpty(before.shards(),
                                               [&](const auto& then) {
                                                 return then.index() == shard.index() &&
                                                        then.address() == shard.address();
                                               }),
                                   shard));
  }
  for (const auto& group : now.groups()) {
    rates.groups.push_back(Between(FindOrEmpty(before.groups(),
                                               [&](const auto& then) {
                                                 return then.model() == group.model() &&
                                                        then.group() == group.group();
                                               }),
                                   group));
  }
  return rates;
}

}  // namespace

double Quantile(const v1::Distribution& distribution, double fraction) {
  const double wanted = fraction * static_cast<double>(distribution.count());
  double lower = 0;
  int64_t below = 0;
  for (const v1::Distribution::Bucket& bucket : distribution.buckets()) {
    const int64_t inside = bucket.count() - below;
    if (inside > 0 && static_cast<double>(bucket.count()) >= wanted) {
      if (std::isinf(bucket.upper())) return lower;
      const double part = (wanted - static_cast<double>(below)) / static_cast<double>(inside);
      return lower + (bucket.upper() - lower) * part;
    }
    below = bucket.count();
    lower = bucket.upper();
  }
  return 0;
}

Rates TotalsOf(const v1::GetStatsResponse& now) {
  return Between(v1::GetStatsResponse(), now, static_cast<double>(now.uptime_ms()) / 1000);
}

Rates RatesBetween(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  return Between(before, now, static_cast<double>(now.time_ms() - before.time_ms()) / 1000);
}

bool SameLife(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  constexpr int64_t kToleranceMs = 500;
  const int64_t started_before = before.time_ms() - before.uptime_ms();
  const int64_t started_now = now.time_ms() - now.uptime_ms();
  return now.time_ms() > before.time_ms() && std::abs(started_now - started_before) < kToleranceMs;
}

StatsSource::StatsSource(const Session& session, int hot_rows)
    : session_(session), hot_rows_(hot_rows) {
  for (const std::string& address : session.addresses) {
    coordinators_.push_back(std::make_unique<Session>(session.At(address)));
  }
}

absl::StatusOr<v1::GetStatsResponse> StatsSource::Fetch() {
  v1::GetStatsRequest request;
  request.set_hot_rows(hot_rows_);
  absl::Status status =
      absl::InvalidArgumentError("--address: empty; give the address of a coordinator");
  for (size_t tried = 0; tried < coordinators_.size(); ++tried) {
    const auto response = coordinators_[current_]->Call<v1::GetStatsResponse>(request);
    if (response.ok()) return response;
    status = response.status();
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) break;
    current_ = (current_ + 1) % coordinators_.size();
  }
  return status;
}

}  // namespace emberd::emberctl
