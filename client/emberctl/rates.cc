#include "client/emberctl/rates.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "config/fold_numbers.h"

namespace emberd::emberctl {

namespace {

// Counts only grow, except where their process has restarted.
template <typename Count>
Count Growth(Count before, Count now) {
  return now >= before ? now - before : now;
}

void Subtract(const v1::ShardStatus& before, v1::ShardStatus* now) {
  // Of one that did not answer then, nobody knows what is new.
  const bool listed = !before.address().empty();
  const bool known = now->reachable() && (!listed || before.reachable());
  const bool same = before.incarnation() == now->incarnation();
  const auto growth = [&](int64_t rows_before, int64_t rows) {
    return known ? Growth(same ? rows_before : 0, rows) : 0;
  };
  now->set_rows_gathered(growth(before.rows_gathered(), now->rows_gathered()));
  now->set_rows_updated(growth(before.rows_updated(), now->rows_updated()));
}

Rates Between(const v1::GetStatsResponse& before, v1::GetStatsResponse now, double seconds) {
  v1::GetStatsResponse counts;  // of those that all fields count
  *counts.mutable_methods() = before.methods();
  *counts.mutable_stages() = before.stages();
  *counts.mutable_models() = before.models();
  *counts.mutable_stacks() = before.stacks();
  *counts.mutable_groups() = before.groups();
  config::FoldNumbers(counts, &now, config::Fold::kSubtract);
  for (v1::ShardStatus& shard : *now.mutable_shards()) {
    const auto then = std::find_if(
        before.shards().begin(), before.shards().end(), [&](const v1::ShardStatus& one) {
          return one.index() == shard.index() && one.address() == shard.address();
        });
    Subtract(then == before.shards().end() ? v1::ShardStatus() : *then, &shard);
  }
  return {std::move(now), std::max(seconds, 1e-3)};
}

}  // namespace

double Rates::SecondsOf(const v1::ShardStatus& shard) const {
  return since_start ? std::max(shard.uptime_ms() / 1000.0, 1e-3) : seconds;
}

int64_t Errors(const v1::MethodStats& method) {
  int64_t errors = 0;
  for (const auto& [code, count] : method.codes()) {
    if (code != "OK") errors += count;
  }
  return errors;
}

std::pair<std::string, double> LastRank(const v1::GroupStats& group) {
  std::string last;
  int64_t all = 0, most = 0;
  for (const auto& [rank, count] : group.last_arrivals()) {
    all += count;
    if (count == 0 || count < most || (count == most && rank > last)) continue;
    most = count;
    last = rank;
  }
  return {last, all > 0 ? static_cast<double>(most) / all : 0};
}

double Quantile(const v1::Distribution& distribution, double fraction) {
  const double wanted = fraction * distribution.count();
  double lower = 0;
  int64_t below = 0;
  for (const v1::Distribution::Bucket& bucket : distribution.buckets()) {
    const int64_t inside = bucket.count() - below;
    if (inside > 0 && bucket.count() >= wanted) {
      if (std::isinf(bucket.upper())) return lower;
      const double part = (wanted - below) / inside;
      return lower + (bucket.upper() - lower) * part;
    }
    below = bucket.count();
    lower = bucket.upper();
  }
  return 0;
}

Rates TotalsOf(const v1::GetStatsResponse& now) {
  Rates totals = Between(v1::GetStatsResponse(), now, now.uptime_ms() / 1000.0);
  totals.since_start = true;
  return totals;
}

Rates RatesBetween(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  return Between(before, now, (now.time_ms() - before.time_ms()) / 1000.0);
}

bool SameLife(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  constexpr int64_t kToleranceMs = 500;
  const int64_t started_before = before.time_ms() - before.uptime_ms();
  const int64_t started_now = now.time_ms() - now.uptime_ms();
  return now.time_ms() > before.time_ms() && std::abs(started_now - started_before) < kToleranceMs;
}

Watch::Watch(const Session& session, int hot_rows) : session_(session), hot_rows_(hot_rows) {
  for (const std::string& address : session.addresses) {
    coordinators_.push_back(std::make_unique<Session>(session.At(address)));
  }
}

absl::StatusOr<v1::GetStatsResponse> Watch::Fetch() {
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

absl::StatusOr<Rates> Watch::Next() {
  ASSIGN_OR_RETURN(v1::GetStatsResponse stats, Fetch());
  const std::string& address = session_.addresses[current_];
  since_start_ = !last_.has_value() || last_address_ != address || !SameLife(*last_, stats);
  const Rates rates = since_start_ ? TotalsOf(stats) : RatesBetween(*last_, stats);
  last_ = std::move(stats);
  last_address_ = address;
  return rates;
}

}  // namespace emberd::emberctl
