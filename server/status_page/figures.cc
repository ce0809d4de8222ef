#include "server/status_page/figures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>

#include "absl/strings/match.h"

namespace emberd::status_page {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr char kLookup[] = "EmbeddingService/Lookup";
constexpr char kApply[] = "EmbeddingService/ApplyGradients";

void AddTo(v1::Distribution* sum, const v1::Distribution& more) {
  std::map<double, int64_t> buckets;
  for (const auto* from : {static_cast<const v1::Distribution*>(sum), &more}) {
    for (const auto& bucket : from->buckets()) buckets[bucket.upper()] += bucket.count();
  }
  sum->set_count(sum->count() + more.count());
  sum->set_sum(sum->sum() + more.sum());
  sum->clear_buckets();
  for (const auto& [upper, count] : buckets) {
    auto* const bucket = sum->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
}

// The element of `all` for which `is` holds, or a new one.
template <typename Message, typename Is>
Message* FindOrAdd(google::protobuf::RepeatedPtrField<Message>* all, Is is) {
  const auto found = std::find_if(all->begin(), all->end(), is);
  return found == all->end() ? all->Add() : &*found;
}

void AddMethods(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::MethodStats& method : more.methods()) {
    v1::MethodStats* const to = FindOrAdd(sum->mutable_methods(), [&](const v1::MethodStats& one) {
      return one.method() == method.method();
    });
    to->set_method(method.method());
    for (const auto& [code, calls] : method.codes()) (*to->mutable_codes())[code] += calls;
    AddTo(to->mutable_seconds(), method.seconds());
    to->set_request_bytes(to->request_bytes() + method.request_bytes());
    to->set_response_bytes(to->response_bytes() + method.response_bytes());
  }
  for (const v1::StageStats& stage : more.stages()) {
    v1::StageStats* const to = FindOrAdd(sum->mutable_stages(), [&](const v1::StageStats& one) {
      return one.stage() == stage.stage();
    });
    to->set_stage(stage.stage());
    AddTo(to->mutable_seconds(), stage.seconds());
  }
}

void AddModels(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::StackStats& stack : more.stacks()) {
    v1::StackStats* const to = FindOrAdd(sum->mutable_stacks(), [&](const v1::StackStats& one) {
      return one.model() == stack.model() && one.stack() == stack.stack();
    });
    v1::StackStats both = stack;  // limits are the same everywhere
    both.set_batches(to->batches() + stack.batches());
    both.set_ids(to->ids() + stack.ids());
    both.set_unique_ids(to->unique_ids() + stack.unique_ids());
    both.set_dropped_ids(to->dropped_ids() + stack.dropped_ids());
    both.set_largest_ids_per_partition(
        std::max(to->largest_ids_per_partition(), stack.largest_ids_per_partition()));
    both.set_largest_unique_ids_per_partition(
        std::max(to->largest_unique_ids_per_partition(), stack.largest_unique_ids_per_partition()));
    *to = std::move(both);
  }
  for (const v1::ModelStats& model : more.models()) {
    v1::ModelStats* const to = FindOrAdd(sum->mutable_models(), [&](const v1::ModelStats& one) {
      return one.model() == model.model();
    });
    to->set_model(model.model());
    to->set_examples(to->examples() + model.examples());
  }
}

// A group may have ranks on several coordinators.
void AddGroups(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  for (const v1::GroupStats& group : more.groups()) {
    v1::GroupStats* const to = FindOrAdd(sum->mutable_groups(), [&](const v1::GroupStats& one) {
      return one.model() == group.model() && one.group() == group.group();
    });
    to->set_model(group.model());
    to->set_group(group.group());
    to->set_updates(to->updates() + group.updates());
    to->set_failures(to->failures() + group.failures());
    to->set_wait_seconds(to->wait_seconds() + group.wait_seconds());
    for (const auto& [rank, times] : group.last_arrivals()) {
      (*to->mutable_last_arrivals())[rank] += times;
    }
  }
}

void AddLoad(const v1::GetStatsResponse& more, v1::GetStatsResponse* sum) {
  sum->set_in_flight_requests(sum->in_flight_requests() + more.in_flight_requests());
  sum->set_in_flight_bytes(sum->in_flight_bytes() + more.in_flight_bytes());
  sum->set_in_flight_budget_bytes(sum->in_flight_budget_bytes() + more.in_flight_budget_bytes());
  sum->set_queued_requests(sum->queued_requests() + more.queued_requests());
  sum->set_train_streams(sum->train_streams() + more.train_streams());
  sum->set_batches(sum->batches() + more.batches());
  sum->set_batch_bytes(sum->batch_bytes() + more.batch_bytes());
  sum->set_batch_budget_bytes(sum->batch_budget_bytes() + more.batch_budget_bytes());
}

const v1::MethodStats& MethodOf(const v1::GetStatsResponse& stats, std::string_view name) {
  for (const v1::MethodStats& method : stats.methods()) {
    if (method.method() == name) return method;
  }
  return v1::MethodStats::default_instance();
}

int64_t CallsOf(const v1::MethodStats& method, const std::string& code) {
  const auto found = method.codes().find(code);
  return found == method.codes().end() ? 0 : found->second;
}

// What one coordinator did between two of its answers.
class Interval {
 public:
  Interval(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now)
      : before_(before),
        now_(now),
        seconds_(static_cast<double>(now.time_ms() - before.time_ms()) / 1000) {}

  double Rate(double now, double before) const { return std::max(0.0, now - before) / seconds_; }

  // Each lookup is a batch of every stack of its model, on a stream or not.
  double Lookups() const {
    std::map<std::pair<std::string, std::string>, int64_t> before;
    for (const auto& stack : before_.stacks()) {
      before[{stack.model(), stack.stack()}] = stack.batches();
    }
    std::map<std::string, double> of_model;
    for (const auto& stack : now_.stacks()) {
      double& largest = of_model[stack.model()];
      largest =
          std::max(largest, Rate(static_cast<double>(stack.batches()),
                                 static_cast<double>(before[{stack.model(), stack.stack()}])));
    }
    double sum = 0;
    for (const auto& [model, rate] : of_model) sum += rate;
    return sum;
  }

  // By unary calls and by groups.
  double Updates() const {
    double sum = Rate(static_cast<double>(CallsOf(MethodOf(now_, kApply), "OK")),
                      static_cast<double>(CallsOf(MethodOf(before_, kApply), "OK")));
    for (const v1::GroupStats& group : now_.groups()) {
      int64_t updates = 0;
      for (const v1::GroupStats& one : before_.groups()) {
        if (one.model() == group.model() && one.group() == group.group()) updates = one.updates();
      }
      sum += Rate(static_cast<double>(group.updates()), static_cast<double>(updates));
    }
    return sum;
  }

  void AddTraffic(Point* point, std::map<std::string, double>* errors) const {
    for (const v1::MethodStats& method : now_.methods()) {
      const v1::MethodStats& old = MethodOf(before_, method.method());
      if (absl::StartsWith(method.method(), "EmbeddingService/")) {
        point->at(Value::kBytesReceived) += Rate(static_cast<double>(method.request_bytes()),
                                                 static_cast<double>(old.request_bytes()));
        point->at(Value::kBytesSent) += Rate(static_cast<double>(method.response_bytes()),
                                             static_cast<double>(old.response_bytes()));
      }
      for (const auto& [code, calls] : method.codes()) {
        if (code == "OK") continue;
        (*errors)[code] +=
            Rate(static_cast<double>(calls), static_cast<double>(CallsOf(old, code)));
      }
    }
  }

  // Only the first coordinator knows shards.
  void AddShards(Point* point) const {
    for (const v1::ShardStatus& shard : now_.shards()) {
      for (const v1::ShardStatus& old : before_.shards()) {
        if (old.index() != shard.index() || old.incarnation() != shard.incarnation() ||
            !shard.reachable() || !old.reachable()) {
          continue;
        }
        point->at(Value::kRowsGathered) += Rate(static_cast<double>(shard.rows_gathered()),
                                                static_cast<double>(old.rows_gathered()));
        point->at(Value::kRowsUpdated) += Rate(static_cast<double>(shard.rows_updated()),
                                               static_cast<double>(old.rows_updated()));
      }
    }
  }

 private:
  const v1::GetStatsResponse& before_;
  const v1::GetStatsResponse& now_;
  const double seconds_;
};

// The latest figures of a coordinator, and those to hold them against; null: there are none.
struct Pair {
  const v1::GetStatsResponse* now = nullptr;
  const v1::GetStatsResponse* before = nullptr;
};

// Those from `ms` before the latest, or from as far back as it has answered in this life.
Pair PairOf(const RecentFigures& recent, size_t index, int64_t ms) {
  const CoordinatorFigures& latest = recent.back()[index];
  Pair pair;
  if (!latest.status.ok()) return pair;
  for (size_t i = recent.size() - 1; i-- > 0;) {
    if (index >= recent[i].size()) break;
    const CoordinatorFigures& one = recent[i][index];
    const bool same_life = one.status.ok() && one.stats.uptime_ms() <= latest.stats.uptime_ms() &&
                           one.stats.time_ms() < latest.stats.time_ms();
    if (!same_life) break;
    pair = {&latest.stats, &one.stats};
    if (one.stats.time_ms() <= latest.stats.time_ms() - ms) break;
  }
  return pair;
}

void SetLatencies(const RecentFigures& recent, int64_t ms, Point* point) {
  v1::Distribution lookups[2], applies[2];  // before, now
  for (size_t i = 0; i < recent.back().size(); ++i) {
    const Pair pair = PairOf(recent, i, ms);
    if (pair.now == nullptr) continue;
    AddTo(&lookups[0], MethodOf(*pair.before, kLookup).seconds());
    AddTo(&lookups[1], MethodOf(*pair.now, kLookup).seconds());
    AddTo(&applies[0], MethodOf(*pair.before, kApply).seconds());
    AddTo(&applies[1], MethodOf(*pair.now, kApply).seconds());
  }
  point->at(Value::kLookupMedian) = Quantile(0.5, lookups[1], lookups[0]);
  point->at(Value::kLookup99) = Quantile(0.99, lookups[1], lookups[0]);
  point->at(Value::kApplyMedian) = Quantile(0.5, applies[1], applies[0]);
  point->at(Value::kApply99) = Quantile(0.99, applies[1], applies[0]);
}

}  // namespace

v1::GetStatsResponse Merge(const ClusterFigures& figures) {
  v1::GetStatsResponse sum = figures.empty() ? v1::GetStatsResponse() : figures.front().stats;
  for (size_t i = 1; i < figures.size(); ++i) {
    if (!figures[i].status.ok()) continue;
    AddLoad(figures[i].stats, &sum);
    AddMethods(figures[i].stats, &sum);
    AddModels(figures[i].stats, &sum);
    AddGroups(figures[i].stats, &sum);
  }
  return sum;
}

const char* NameOf(Value value) {
  static constexpr const char* kNames[kValues] = {"lookups",  "updates", "gathered", "updated",
                                                  "received", "sent",    "lookup50", "lookup99",
                                                  "apply50",  "apply99", "errors"};
  return kNames[static_cast<size_t>(value)];
}

Point Gap(int64_t time_ms) {
  Point point{.time_ms = time_ms};
  point.values.fill(kUnknown);
  return point;
}

Point Latest(const RecentFigures& recent, int64_t rates_ms, int64_t latencies_ms) {
  Point point{.time_ms = recent.back().front().stats.time_ms()};
  std::map<std::string, double> errors;
  for (size_t i = 0; i < recent.back().size(); ++i) {
    const Pair pair = PairOf(recent, i, rates_ms);
    if (pair.now == nullptr) continue;
    const Interval interval(*pair.before, *pair.now);
    point.at(Value::kLookups) += interval.Lookups();
    point.at(Value::kUpdates) += interval.Updates();
    interval.AddTraffic(&point, &errors);
    interval.AddShards(&point);
  }
  for (const auto& [code, rate] : errors) {
    point.at(Value::kErrors) += rate;
    if (rate > 0) point.errors.emplace_back(code, rate);
  }
  SetLatencies(recent, latencies_ms, &point);
  return point;
}

double LookupsPerSecond(const RecentFigures& recent, size_t index, int64_t over_ms) {
  const Pair pair = PairOf(recent, index, over_ms);
  return pair.now == nullptr ? 0 : Interval(*pair.before, *pair.now).Lookups();
}

double Quantile(double q, const v1::Distribution& now, const v1::Distribution& before) {
  std::map<double, int64_t> earlier;
  for (const auto& bucket : before.buckets()) earlier[bucket.upper()] = bucket.count();
  const auto total = static_cast<double>(now.count() - before.count());
  if (total <= 0) return kUnknown;
  double lower = 0, below = 0;
  for (const auto& bucket : now.buckets()) {
    const auto up_to = static_cast<double>(bucket.count() - earlier[bucket.upper()]);
    if (up_to >= q * total && up_to > below) {
      if (!std::isfinite(bucket.upper())) return lower;
      return lower + (bucket.upper() - lower) * (q * total - below) / (up_to - below);
    }
    lower = bucket.upper();
    below = up_to;
  }
  return lower;
}

}  // namespace emberd::status_page
