#include "client/emberctl/rates.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>

namespace emberd::emberctl {

namespace {

// Counts only grow, except where their process has restarted.
template <typename Count>
Count Growth(Count before, Count now) {
  return now >= before ? now - before : now;
}

// Each of these leaves in `now` what has been counted since `before`.
void Subtract(const v1::Distribution& before, v1::Distribution* now) {
  if (before.count() > now->count() || before.buckets_size() != now->buckets_size()) return;
  now->set_count(now->count() - before.count());
  now->set_sum(std::max(now->sum() - before.sum(), 0.0));
  for (int i = 0; i < now->buckets_size(); ++i) {
    v1::Distribution::Bucket* const bucket = now->mutable_buckets(i);
    bucket->set_count(Growth(before.buckets(i).count(), bucket->count()));
  }
}

using CountsByName = google::protobuf::Map<std::string, int64_t>;
void Subtract(const CountsByName& before, CountsByName* now) {
  for (auto& [name, count] : *now) {
    const auto then = before.find(name);
    if (then != before.end()) count = Growth(then->second, count);
  }
}

void Subtract(const v1::MethodStats& before, v1::MethodStats* now) {
  Subtract(before.codes(), now->mutable_codes());
  Subtract(before.seconds(), now->mutable_seconds());
  now->set_request_bytes(Growth(before.request_bytes(), now->request_bytes()));
  now->set_response_bytes(Growth(before.response_bytes(), now->response_bytes()));
}

void Subtract(const v1::StageStats& before, v1::StageStats* now) {
  Subtract(before.seconds(), now->mutable_seconds());
}

void Subtract(const v1::ModelStats& before, v1::ModelStats* now) {
  now->set_examples(Growth(before.examples(), now->examples()));
}

void Subtract(const v1::StackStats& before, v1::StackStats* now) {
  now->set_batches(Growth(before.batches(), now->batches()));
  now->set_ids(Growth(before.ids(), now->ids()));
  now->set_unique_ids(Growth(before.unique_ids(), now->unique_ids()));
  now->set_dropped_ids(Growth(before.dropped_ids(), now->dropped_ids()));
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

void Subtract(const v1::GroupStats& before, v1::GroupStats* now) {
  now->set_updates(Growth(before.updates(), now->updates()));
  now->set_failures(Growth(before.failures(), now->failures()));
  now->set_wait_seconds(Growth(before.wait_seconds(), now->wait_seconds()));
  Subtract(before.last_arrivals(), now->mutable_last_arrivals());
}

// What an element is found by in another answer.
auto KeyOf(const v1::MethodStats& method) { return std::tie(method.method()); }
auto KeyOf(const v1::StageStats& stage) { return std::tie(stage.stage()); }
auto KeyOf(const v1::ModelStats& model) { return std::tie(model.model()); }
auto KeyOf(const v1::StackStats& stack) { return std::tie(stack.model(), stack.stack()); }
auto KeyOf(const v1::ShardStatus& shard) { return std::pair(shard.index(), shard.address()); }
auto KeyOf(const v1::GroupStats& group) { return std::tie(group.model(), group.group()); }

template <typename Element>
void SubtractEach(const google::protobuf::RepeatedPtrField<Element>& before,
                  google::protobuf::RepeatedPtrField<Element>* now) {
  for (Element& element : *now) {
    const auto then = std::find_if(before.begin(), before.end(), [&](const Element& one) {
      return KeyOf(one) == KeyOf(element);
    });
    Subtract(then == before.end() ? Element::default_instance() : *then, &element);
  }
}

Rates Between(const v1::GetStatsResponse& before, v1::GetStatsResponse now, double seconds) {
  SubtractEach(before.methods(), now.mutable_methods());
  SubtractEach(before.stages(), now.mutable_stages());
  SubtractEach(before.models(), now.mutable_models());
  SubtractEach(before.stacks(), now.mutable_stacks());
  SubtractEach(before.shards(), now.mutable_shards());
  SubtractEach(before.groups(), now.mutable_groups());
  return {std::move(now), std::max(seconds, 1e-3)};
}

}  // namespace

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
  return Between(v1::GetStatsResponse(), now, now.uptime_ms() / 1000.0);
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
