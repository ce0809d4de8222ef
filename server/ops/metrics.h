// What the servers report about themselves. One Metrics per process, injected; nothing is global,
// so that several clusters can run in one test.
//
// Use: ask for the handles of a server, a model or a shard once (a lookup under a lock) and keep
// them; observing through a handle is then a few atomic operations. Handles are owned by the
// Metrics and live as long as it does. Everything here is thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <prometheus/client_metric.h>
#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "emberd/v1/train.pb.h"
#include "server/ops/catalogue.h"

namespace emberd::ops {

// Bytes of this process in RAM, and of these in huge pages. To learn the latter, the kernel walks
// all page tables of the process: tens of milliseconds for many GiB in small pages.
std::optional<int64_t> ResidentBytes();
std::optional<int64_t> HugePageBytes();

// The catalogue's metrics as prometheus-cpp families. A child is made when it is first asked for;
// it lives as long as the registry. Asking takes a lock: keep the reference. Label values are given
// in the catalogue's order; another number of them, or another type than the catalogue's, is a
// mistake in the calling code and ends the process.
class MetricRegistry {
 public:
  MetricRegistry();

  // Nothing, or of the catalogue's type.
  using Child = std::variant<std::monostate, prometheus::Counter*, prometheus::Gauge*,
                             prometheus::Histogram*>;
  Child Get(MetricId id, const std::vector<std::string>& label_values);

  prometheus::Counter& counter(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Counter*>(Get(id, label_values));
  }
  prometheus::Gauge& gauge(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Gauge*>(Get(id, label_values));
  }
  prometheus::Histogram& histogram(MetricId id, const std::vector<std::string>& label_values) {
    return *std::get<prometheus::Histogram*>(Get(id, label_values));
  }

  std::shared_ptr<prometheus::Collectable> collectable() const { return registry_; }

 private:
  using Family =
      std::variant<prometheus::Family<prometheus::Counter>*, prometheus::Family<prometheus::Gauge>*,
                   prometheus::Family<prometheus::Histogram>*>;

  std::shared_ptr<prometheus::Registry> registry_;
  std::vector<Family> families_;  // by MetricId
};

class Metrics;

// All metrics of the catalogue that have exactly these labels, for one value of each label. They
// begin at 0.
class LabelledMetrics {
 public:
  // Without `gauges`, it has no gauges, and Set does nothing.
  LabelledMetrics(MetricRegistry& registry, const std::vector<std::string>& names,
                  const std::vector<std::string>& values, bool gauges = true);
  // A gauge.
  void Set(MetricId id, double value) {
    auto* const gauge = std::get_if<prometheus::Gauge*>(&metrics_[static_cast<size_t>(id)]);
    if (gauge != nullptr) (*gauge)->Set(value);
  }
  void Change(MetricId id, double more) { Of<prometheus::Gauge>(id)->Increment(more); }
  // A histogram.
  void Observe(MetricId id, double value) { Of<prometheus::Histogram>(id)->Observe(value); }
  // A counter.
  void Add(MetricId id, double more = 1) { Of<prometheus::Counter>(id)->Increment(more); }
  // Brings a counter to a total that is counted elsewhere. Not thread-safe.
  void SetTotal(MetricId id, double total) {
    Add(id, total - Of<prometheus::Counter>(id)->Value());
  }

 private:
  template <typename Metric>
  Metric* Of(MetricId id) const {
    return std::get<Metric*>(metrics_[static_cast<size_t>(id)]);
  }
  std::vector<MetricRegistry::Child> metrics_;  // by MetricId; nothing: not of these
};

// What one server (the whole of a coordinator or of a shard) holds: metrics with the label
// "server". Made by Metrics::Server.
class ServerMetrics : public LabelledMetrics {
 public:
  ServerMetrics(Metrics* metrics, MetricRegistry& registry, const std::string& server)
      : LabelledMetrics(registry, {"server"}, {server}), all_(metrics) {}
  void SetBudgets(const v1::BudgetConfig& budgets);

 private:
  friend class RpcTimer;
  Metrics* const all_;
};

// Counts and times one request from construction until Finish; in flight meanwhile. One that is
// destroyed unfinished counts as CANCELLED. Not thread-safe; belongs to the request's handler.
class RpcTimer {
 public:
  RpcTimer(ServerMetrics* server, Rpc rpc, int64_t request_bytes = 0);
  ~RpcTimer();
  RpcTimer(const RpcTimer&) = delete;
  RpcTimer& operator=(const RpcTimer&) = delete;

  void AddRequestBytes(int64_t bytes);   // as parts arrive
  void AddResponseBytes(int64_t bytes);  // as parts leave
  void Finish(absl::StatusCode code);    // later calls do nothing

 private:
  ServerMetrics* const server_;
  const Rpc rpc_;
  const std::chrono::steady_clock::time_point start_;
  bool finished_ = false;
};

// One model on a coordinator: metrics with the label "model", and its batches.
class ModelMetrics : public LabelledMetrics {
 public:
  // `statistics` has the stacks that Metrics::Model was given, in that order.
  void ObserveBatch(const v1::BatchStatistics& statistics);
  void AddCheckpoint(int64_t bytes, absl::Duration pause);
  // Of a stack of that list; 0: none.
  void SetLimits(int stack, int64_t max_ids, int64_t max_unique_ids);

 private:
  friend class Metrics;
  ModelMetrics(MetricRegistry& registry, const std::string& model)
      : LabelledMetrics(registry, {"model"}, {model}) {}

  // Without gauges beyond kMaxStackLabels: stacks that share a label have no limit in common.
  std::vector<LabelledMetrics> stacks_;
};

// Work of one shard on one stack of a model: metrics with the labels "shard", "model" and "stack".
struct ShardStackMetrics : LabelledMetrics {
  prometheus::Counter* sent_sums;  // bytes of kShardSentBytes, as partial sums
  prometheus::Counter* sent_rows;  // ... and as unique rows
};
// Of each stack that Metrics::ShardModel was given.
using ShardModelMetrics = std::vector<ShardStackMetrics>;

// Calls by method and status code, and what they took. Handles are made on first use.
class CallMetrics {
 public:
  // `calls` and `seconds` have `labels`, then the method; `calls` also the code.
  CallMetrics(MetricRegistry& registry, MetricId calls, MetricId seconds,
              std::vector<std::string> labels)
      : registry_(registry), calls_id_(calls), seconds_id_(seconds), labels_(std::move(labels)) {}

  void Observe(Rpc rpc, absl::StatusCode code, double seconds);

 private:
  MetricRegistry& registry_;
  const MetricId calls_id_;
  const MetricId seconds_id_;
  const std::vector<std::string> labels_;
  std::array<std::atomic<prometheus::Histogram*>, kRpcCount> seconds_{};
  std::array<std::array<std::atomic<prometheus::Counter*>, kCodeCount>, kRpcCount> calls_{};
};

// A coordinator's calls to one shard. Made by Metrics::ShardLink.
class ShardLinkMetrics {
 public:
  ShardLinkMetrics(MetricRegistry& registry, const std::string& shard)
      : calls_(registry, MetricId::kShardCalls, MetricId::kShardCallSeconds, {shard}),
        reachable_(registry.gauge(MetricId::kShardReachable, {shard})) {}

  // `rpc` is one of ShardService. UNAVAILABLE and DEADLINE_EXCEEDED mark the shard unreachable,
  // other codes reachable.
  void Observe(Rpc rpc, absl::StatusCode code, double seconds);
  // For what no call shows, e.g. a change of the channel's state.
  void SetReachable(bool reachable) { reachable_.Set(reachable ? 1 : 0); }

 private:
  CallMetrics calls_;
  prometheus::Gauge& reachable_;
};

// What a coordinator reports about one training group: the ranks that it serves. Made by
// Metrics::Group.
class GroupMetrics {
 public:
  // Ranks with a series of their own; what comes later is "other".
  static constexpr int kMaxRankLabels = 64;

  GroupMetrics(MetricRegistry& registry, const std::string& model, const std::string& group);

  void ObserveLookup(const v1::StepTimes& times);
  void ObserveUpdate(const v1::StepTimes& times);
  // What a lookup of a rank lost.
  void AddDropped(int rank, const v1::BatchStatistics& statistics);
  // A stream that ended with an error.
  void AddFailure(absl::StatusCode code);

 private:
  void ObserveStage(std::string_view stage, int64_t us);
  // By rank, made on first use; the last is that of all others.
  using ByRank = std::array<std::atomic<prometheus::Counter*>, kMaxRankLabels + 1>;
  prometheus::Counter& OfRank(MetricId id, int rank, ByRank* counters);
  // What both kinds of request have.
  void ObserveWaits(const v1::StepTimes& times);

  MetricRegistry& registry_;
  const std::string model_;
  const std::string group_;
  prometheus::Counter& steps_;
  std::map<std::string_view, prometheus::Histogram*> stages_;  // by name
  ByRank last_arrivals_{}, dropped_{};
};

class Metrics {
 public:
  // Different (model, stack) labels that are given out; what comes later is labelled "other", so
  // that the number of time series stays bounded whatever trainers declare.
  static constexpr size_t kMaxStackLabels = 256;
  // The same for (model, group).
  static constexpr size_t kMaxGroupLabels = 64;
  // The same for (model, table); tables beyond it are not shown.
  static constexpr size_t kMaxTableLabels = 256;

  // `role` as emberd_build_info shows it: "up", "coordinator" or "shard".
  explicit Metrics(const std::string& role);

  ServerMetrics* Server(const std::string& kind, int index);  // kind: "coordinator" or "shard"
  ModelMetrics* Model(const std::string& model, const std::vector<std::string>& stacks);
  ShardModelMetrics* ShardModel(int shard, const std::string& model,
                                const std::vector<std::string>& stacks);
  // Work of one partition.
  LabelledMetrics Partition(int shard, int partition);
  ShardLinkMetrics* ShardLink(int shard);

  // Shares of the lookups of a table on a shard that go to its `top` hottest rows, by `top`.
  void SetHotRowShares(int shard, const std::string& model, const std::string& table,
                       const std::map<int, double>& shares);

  // The same for the same names; "other" for all groups beyond kMaxGroupLabels.
  GroupMetrics* Group(const std::string& model, const std::string& group);

  // RpcTimer is the usual way.
  void ObserveRpc(Rpc rpc, absl::StatusCode code, double seconds) {
    rpcs_.Observe(rpc, code, seconds);
  }
  void AddRpcBytes(Rpc rpc, int64_t request_bytes, int64_t response_bytes);
  void ObserveStage(Stage stage, double seconds) {
    stages_[static_cast<size_t>(stage)]->Observe(seconds);
  }

  // What to expose.
  std::vector<std::weak_ptr<prometheus::Collectable>> collectables() const;

 private:
  // Of each stack {model, stack}, or {"other", "other"} beyond kMaxStackLabels. An empty stack
  // stands for the model itself.
  using Labels = std::vector<std::vector<std::string>>;
  Labels LabelsOf(const std::string& model, const std::vector<std::string>& stacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  MetricRegistry registry_;
  std::shared_ptr<prometheus::Collectable> process_;
  CallMetrics rpcs_{registry_, MetricId::kRpcs, MetricId::kRpcSeconds, {}};
  std::array<std::atomic<prometheus::Counter*>, kRpcCount> request_bytes_{};
  std::array<std::atomic<prometheus::Counter*>, kRpcCount> response_bytes_{};
  std::array<prometheus::Histogram*, kStageCount> stages_;

  absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<ServerMetrics>> servers_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::unique_ptr<ShardLinkMetrics>> links_ ABSL_GUARDED_BY(mutex_);
  // By labels, because their number has a bound, and that of models has none.
  std::map<std::pair<std::string, Labels>, std::unique_ptr<ModelMetrics>> models_
      ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, Labels>, ShardModelMetrics> shard_models_ ABSL_GUARDED_BY(mutex_);
  std::set<std::vector<std::string>> stack_labels_ ABSL_GUARDED_BY(mutex_);  // given out so far
  std::set<std::pair<std::string, std::string>> table_labels_ ABSL_GUARDED_BY(mutex_);  // the same
  std::map<std::pair<std::string, std::string>, std::unique_ptr<GroupMetrics>> groups_
      ABSL_GUARDED_BY(mutex_);
};

// Times one stage of a request, from construction to destruction.
class StageTimer {
 public:
  StageTimer(Metrics* metrics, Stage stage)
      : metrics_(metrics), stage_(stage), start_(std::chrono::steady_clock::now()) {}
  ~StageTimer() {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    metrics_->ObserveStage(stage_, elapsed.count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  Metrics* const metrics_;
  const Stage stage_;
  const std::chrono::steady_clock::time_point start_;
};

// What the metrics say at one moment, for those who read them in the process itself.
class MetricSnapshot {
 public:
  struct Series {
    std::vector<std::string> labels;  // values, in the catalogue's order
    double value = 0;                 // of a counter or gauge
    prometheus::ClientMetric::Histogram histogram;
  };

  // Of what Metrics::collectables gives. Names that the catalogue does not have are left out.
  explicit MetricSnapshot(const std::vector<std::weak_ptr<prometheus::Collectable>>& collectables);

  // Those that exist so far, by labels.
  const std::vector<Series>& All(MetricId id) const { return series_[static_cast<size_t>(id)]; }
  // Null if there is none.
  const Series* Find(MetricId id, const std::vector<std::string>& labels) const;
  // 0 if there is none.
  double Value(MetricId id, const std::vector<std::string>& labels) const;

 private:
  std::vector<std::vector<Series>> series_;  // by MetricId
};

}  // namespace emberd::ops
