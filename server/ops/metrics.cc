#include "server/ops/metrics.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <type_traits>

#include <dirent.h>
#include <prometheus/metric_family.h>
#include <time.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace emberd::ops {
namespace {

prometheus::Labels MakeLabels(MetricId id, const std::vector<std::string>& values) {
  const std::vector<std::string> names = Describe(id).LabelNames();
  if (names.size() != values.size()) {
    std::fprintf(stderr, "metric %s has %zu labels, got %zu\n", Describe(id).name.data(),
                 names.size(), values.size());
    std::abort();
  }
  prometheus::Labels labels;
  for (size_t i = 0; i < names.size(); ++i) labels[names[i]] = values[i];
  return labels;
}

MetricSnapshot::Series MakeSeries(const MetricInfo& metric, prometheus::ClientMetric from) {
  MetricSnapshot::Series series;
  for (const std::string& name : metric.LabelNames()) {
    const auto found = std::find_if(from.label.begin(), from.label.end(),
                                    [&](const auto& label) { return label.name == name; });
    series.labels.push_back(found == from.label.end() ? "" : found->value);
  }
  series.value = metric.type == MetricType::kGauge ? from.gauge.value : from.counter.value;
  series.histogram = std::move(from.histogram);
  return series;
}

double Seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds since 1970. /proc gives the start in clock ticks after boot as field 22; the second one,
// the program's name, may hold spaces but ends with the last ')'.
std::optional<double> StartSeconds() {
  std::ifstream file("/proc/self/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  size_t at = name_end + 1;
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
  if (at == std::string::npos) return std::nullopt;
  const double boot = Seconds(CLOCK_REALTIME) - Seconds(CLOCK_BOOTTIME);
  return boot + std::strtod(stat.c_str() + at, nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::optional<double> OpenFds() {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return std::nullopt;
  int entries = 0;
  while (readdir(directory) != nullptr) ++entries;
  closedir(directory);
  return entries - 3;  // ".", ".." and the descriptor of the directory itself
}

// CPU, memory, descriptors and start time of this process, read from /proc whenever they are
// scraped. Thread-safe. What cannot be read is left out.
class ProcessMetrics : public prometheus::Collectable {
 public:
  ProcessMetrics() : start_seconds_(StartSeconds()) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families;
    Add(MetricId::kProcessStartSeconds, start_seconds_, &families);
    Add(MetricId::kProcessCpuSeconds, Seconds(CLOCK_PROCESS_CPUTIME_ID), &families);
    Add(MetricId::kProcessResidentBytes, ResidentBytes(), &families);
    Add(MetricId::kProcessHugePageBytes, HugePageBytes(), &families);
    Add(MetricId::kProcessOpenFds, OpenFds(), &families);
    return families;
  }

 private:
  static void Add(MetricId id, std::optional<double> value,
                  std::vector<prometheus::MetricFamily>* families) {
    if (!value.has_value()) return;
    const MetricInfo& info = Describe(id);
    prometheus::ClientMetric metric;
    const bool counter = info.type == MetricType::kCounter;
    (counter ? metric.counter.value : metric.gauge.value) = *value;
    prometheus::MetricFamily& family = families->emplace_back();
    family.name = std::string(info.name);
    family.help = std::string(info.help);
    family.type = counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
    family.metric.push_back(std::move(metric));
  }

  const std::optional<double> start_seconds_;
};

using Clock = std::chrono::steady_clock;

// The child in `slot`, made by `make` on first use. Two threads may both call make: it gives both
// the same child.
template <typename Child, typename Make>
Child& Cached(std::atomic<Child*>& slot, Make make) {
  Child* child = slot.load(std::memory_order_acquire);
  if (child == nullptr) {
    child = make();
    slot.store(child, std::memory_order_release);
  }
  return *child;
}

size_t CodeIndex(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kCodeCount ? index : static_cast<size_t>(absl::StatusCode::kUnknown);
}

}  // namespace

std::optional<int64_t> ResidentBytes() {
  std::ifstream statm("/proc/self/statm");  // in pages: total, then resident
  int64_t total = 0;
  int64_t resident = 0;
  if (!(statm >> total >> resident)) return std::nullopt;
  return resident * sysconf(_SC_PAGESIZE);
}

std::optional<int64_t> HugePageBytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");  // "AnonHugePages:   2048 kB"
  std::optional<int64_t> bytes;
  for (std::string line; std::getline(rollup, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kilobytes = 0;
    if (!(fields >> name >> kilobytes)) continue;
    if (name == "AnonHugePages:" || name == "ShmemPmdMapped:") {
      bytes = bytes.value_or(0) + kilobytes * 1024;
    }
  }
  return bytes;
}

MetricRegistry::MetricRegistry() : registry_(std::make_shared<prometheus::Registry>()) {
  for (const MetricInfo& metric : MetricCatalogue()) {
    const auto add = [&](auto builder) {
      builder.Name(std::string(metric.name)).Help(std::string(metric.help));
      families_.emplace_back(&builder.Register(*registry_));
    };
    switch (metric.type) {
      case MetricType::kCounter:
        add(prometheus::BuildCounter());
        break;
      case MetricType::kGauge:
        add(prometheus::BuildGauge());
        break;
      case MetricType::kHistogram:
        add(prometheus::BuildHistogram());
        break;
    }
  }
}

MetricRegistry::Child MetricRegistry::Get(MetricId id, const std::vector<std::string>& values) {
  const auto add = [&](auto* family) -> Child {
    if constexpr (std::is_same_v<decltype(family), prometheus::Family<prometheus::Histogram>*>) {
      return &family->Add(MakeLabels(id, values), BucketBounds(Describe(id)));
    } else {
      return &family->Add(MakeLabels(id, values));
    }
  };
  return std::visit(add, families_[static_cast<size_t>(id)]);
}

LabelledMetrics::LabelledMetrics(MetricRegistry& registry, const std::vector<std::string>& names,
                                 const std::vector<std::string>& values, bool gauges)
    : metrics_(MetricCatalogue().size()) {
  for (const MetricInfo& metric : MetricCatalogue()) {
    if (metric.LabelNames() != names || (metric.type == MetricType::kGauge && !gauges)) continue;
    metrics_[static_cast<size_t>(metric.id)] = registry.Get(metric.id, values);
  }
}

void ServerMetrics::SetBudgets(const v1::BudgetConfig& budgets) {
  Set(MetricId::kMaxBatches, budgets.max_batches());
  Set(MetricId::kBatchBudgetBytes, static_cast<double>(budgets.batch_bytes()));
  Set(MetricId::kInFlightBudgetBytes, static_cast<double>(budgets.in_flight_bytes()));
}

RpcTimer::RpcTimer(ServerMetrics* server, Rpc rpc, int64_t request_bytes)
    : server_(server), rpc_(rpc), start_(Clock::now()) {
  server_->Change(MetricId::kInFlightRequests, 1);
  AddRequestBytes(request_bytes);
}

RpcTimer::~RpcTimer() { Finish(absl::StatusCode::kCancelled); }

void RpcTimer::AddRequestBytes(int64_t bytes) {
  if (bytes > 0) server_->all_->AddRpcBytes(rpc_, bytes, 0);
}

void RpcTimer::AddResponseBytes(int64_t bytes) { server_->all_->AddRpcBytes(rpc_, 0, bytes); }

void RpcTimer::Finish(absl::StatusCode code) {
  if (finished_) return;
  finished_ = true;
  server_->Change(MetricId::kInFlightRequests, -1);
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  server_->all_->ObserveRpc(rpc_, code, elapsed.count());
}

void ModelMetrics::ObserveBatch(const v1::BatchStatistics& statistics) {
  Observe(MetricId::kBatchMinibatches, statistics.num_minibatches());
  const size_t stacks = std::min<size_t>(stacks_.size(), statistics.stacks_size());
  for (size_t i = 0; i < stacks; ++i) {
    using enum MetricId;
    const v1::StackStatistics& batch = statistics.stacks(i);
    stacks_[i].Observe(kBatchIds, batch.ids());
    stacks_[i].Observe(kBatchUniqueIds, batch.unique_ids());
    stacks_[i].Observe(kBatchDuplicateIds, batch.duplicate_ids());
    stacks_[i].Observe(kBatchMaxIds, batch.max_ids_per_partition());
    stacks_[i].Observe(kBatchMaxUniqueIds, batch.max_unique_ids_per_partition());
    stacks_[i].Observe(kBatchBufferCells, batch.required_buffer_size());
    stacks_[i].Add(kDroppedIds, batch.dropped_ids());
    if (batch.ids() > 0) stacks_[i].Observe(kBatchImbalance, batch.imbalance());
  }
}

void ModelMetrics::AddCheckpoint(int64_t bytes, absl::Duration pause) {
  Add(MetricId::kCheckpoints);
  Add(MetricId::kCheckpointBytes, static_cast<double>(bytes));
  const absl::Time now = absl::Now();  // a date
  Set(MetricId::kCheckpointSeconds, absl::ToDoubleSeconds(now - absl::UnixEpoch()));
  Set(MetricId::kCheckpointPauseSeconds, absl::ToDoubleSeconds(pause));
}

void ModelMetrics::SetLimits(int stack, int64_t max_ids, int64_t max_unique_ids) {
  stacks_[stack].Set(MetricId::kStackMaxIds, max_ids);
  stacks_[stack].Set(MetricId::kStackMaxUniqueIds, max_unique_ids);
}

void CallMetrics::Observe(Rpc rpc, absl::StatusCode code, double seconds) {
  const auto method = static_cast<size_t>(rpc);
  const auto labels = [&] {
    std::vector<std::string> with_method = labels_;
    with_method.push_back(RpcName(rpc));
    return with_method;
  };
  const auto make_seconds = [&] { return &registry_.histogram(seconds_id_, labels()); };
  const auto make_calls = [&] {
    std::vector<std::string> with_code = labels();
    with_code.push_back(CodeName(code));
    return &registry_.counter(calls_id_, with_code);
  };
  Cached(seconds_[method], make_seconds).Observe(seconds);
  Cached(calls_[method][CodeIndex(code)], make_calls).Increment();
}

void ShardLinkMetrics::Observe(Rpc rpc, absl::StatusCode code, double seconds) {
  calls_.Observe(rpc, code, seconds);
  SetReachable(code != absl::StatusCode::kUnavailable &&
               code != absl::StatusCode::kDeadlineExceeded);
}

Metrics::Metrics(const std::string& role) : process_(std::make_shared<ProcessMetrics>()) {
  registry_.gauge(MetricId::kBuildInfo, {EMBERD_VERSION, role}).Set(1);
  for (size_t i = 0; i < kStageCount; ++i) {
    const std::string name(StageName(static_cast<Stage>(i)));
    stages_[i] = &registry_.histogram(MetricId::kStageSeconds, {name});
  }
}

ServerMetrics* Metrics::Server(const std::string& kind, int index) {
  const std::string name = kind + "-" + std::to_string(index);
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ServerMetrics>& server = servers_[name];
  if (server == nullptr) server = std::make_unique<ServerMetrics>(this, registry_, name);
  return server.get();
}

ShardLinkMetrics* Metrics::ShardLink(int shard) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ShardLinkMetrics>& link = links_[shard];
  if (link == nullptr) link = std::make_unique<ShardLinkMetrics>(registry_, std::to_string(shard));
  return link.get();
}

ModelMetrics* Metrics::Model(const std::string& model, const std::vector<std::string>& stacks) {
  absl::MutexLock lock(&mutex_);
  const std::string label = LabelsOf(model, {""})[0][0];
  const Labels of_stacks = LabelsOf(model, stacks);
  std::unique_ptr<ModelMetrics>& metrics = models_[{label, of_stacks}];
  if (metrics != nullptr) return metrics.get();
  metrics.reset(new ModelMetrics(registry_, label));
  for (const std::vector<std::string>& labels : of_stacks) {
    metrics->stacks_.emplace_back(registry_, std::vector<std::string>{"model", "stack"}, labels,
                                  /*gauges=*/labels[0] != "other");
  }
  return metrics.get();
}

ShardModelMetrics* Metrics::ShardModel(int shard, const std::string& model,
                                       const std::vector<std::string>& stacks) {
  absl::MutexLock lock(&mutex_);
  const Labels of_stacks = LabelsOf(model, stacks);
  ShardModelMetrics& metrics = shard_models_[{shard, of_stacks}];
  if (!metrics.empty()) return &metrics;
  const std::string index = std::to_string(shard);
  for (std::vector<std::string> labels : of_stacks) {
    labels.insert(labels.begin(), index);
    const auto sent = [&](const char* mode) -> prometheus::Counter* {
      std::vector<std::string> with_mode = labels;
      with_mode.push_back(mode);
      return &registry_.counter(MetricId::kShardSentBytes, with_mode);
    };
    metrics.push_back({LabelledMetrics(registry_, {"shard", "model", "stack"}, labels),
                       sent("partial_sums"), sent("unique_rows")});
  }
  return &metrics;
}

LabelledMetrics Metrics::Partition(int shard, int partition) {
  return {registry_, {"shard", "partition"}, {std::to_string(shard), std::to_string(partition)}};
}

void Metrics::SetHotRowShares(int shard, const std::string& model, const std::string& table,
                              const std::map<int, double>& shares) {
  {
    absl::MutexLock lock(&mutex_);
    if (table_labels_.size() >= kMaxTableLabels && table_labels_.count({model, table}) == 0) return;
    table_labels_.emplace(model, table);
  }
  for (const auto& [top, share] : shares) {
    registry_
        .gauge(MetricId::kHotRowsShare, {std::to_string(shard), model, table, std::to_string(top)})
        .Set(share);
  }
}

GroupMetrics* Metrics::Group(const std::string& model, const std::string& group) {
  absl::MutexLock lock(&mutex_);
  std::pair<std::string, std::string> labels(model, group);
  if (groups_.count(labels) == 0 && groups_.size() >= kMaxGroupLabels) labels = {"other", "other"};
  std::unique_ptr<GroupMetrics>& metrics = groups_[labels];
  if (metrics == nullptr) {
    metrics = std::make_unique<GroupMetrics>(registry_, labels.first, labels.second);
  }
  return metrics.get();
}

Metrics::Labels Metrics::LabelsOf(const std::string& model,
                                  const std::vector<std::string>& stacks) {
  Labels all;
  for (const std::string& stack : stacks) {
    all.push_back({model, stack});
    if (stack_labels_.size() < kMaxStackLabels) stack_labels_.insert(all.back());
    if (stack_labels_.count(all.back()) == 0) all.back() = {"other", "other"};
  }
  return all;
}

void Metrics::AddRpcBytes(Rpc rpc, int64_t request_bytes, int64_t response_bytes) {
  const auto method = static_cast<size_t>(rpc);
  const auto make = [&](MetricId id) {
    return [this, id, rpc] { return &registry_.counter(id, {RpcName(rpc)}); };
  };
  Cached(request_bytes_[method], make(MetricId::kRpcRequestBytes)).Increment(request_bytes);
  Cached(response_bytes_[method], make(MetricId::kRpcResponseBytes)).Increment(response_bytes);
}

std::vector<std::weak_ptr<prometheus::Collectable>> Metrics::collectables() const {
  return {registry_.collectable(), process_};
}

GroupMetrics::GroupMetrics(MetricRegistry& registry, const std::string& model,
                           const std::string& group)
    : registry_(registry),
      model_(model),
      group_(group),
      steps_(registry.counter(MetricId::kGroupSteps, {model, group})) {
  for (const char* stage :
       {"preprocess", "wait_for_ranks", "wait_for_update", "gather", "combine", "apply"}) {
    stages_[stage] = &registry.histogram(MetricId::kGroupStageSeconds, {model, group, stage});
  }
  // Prometheus sees no growth in the first value of a series.
  for (size_t code = 1; code < kCodeCount; ++code) {
    registry.counter(MetricId::kGroupFailures, {model, group, CodeName(absl::StatusCode(code))});
  }
}

void GroupMetrics::ObserveStage(std::string_view stage, int64_t us) {
  stages_.at(stage)->Observe(static_cast<double>(us) * 1e-6);
}

void GroupMetrics::ObserveLookup(const v1::StepTimes& times) {
  ObserveStage("preprocess", times.preprocess_us());
  ObserveStage("gather", times.shards_us());
  ObserveStage("combine", times.combine_us());
  ObserveWaits(times);
}

void GroupMetrics::ObserveUpdate(const v1::StepTimes& times) {
  steps_.Increment();
  ObserveStage("apply", times.shards_us());
  ObserveWaits(times);
}

void GroupMetrics::ObserveWaits(const v1::StepTimes& times) {
  ObserveStage("wait_for_update", times.wait_for_update_us());
  if (times.slowest_rank() < 0) return;
  ObserveStage("wait_for_ranks", times.wait_for_ranks_us());
  OfRank(MetricId::kGroupLastArrivals, times.slowest_rank(), &last_arrivals_).Increment();
}

prometheus::Counter& GroupMetrics::OfRank(MetricId id, int rank, ByRank* counters) {
  return Cached((*counters)[std::min(rank, kMaxRankLabels)], [&] {
    const std::string label = rank < kMaxRankLabels ? std::to_string(rank) : "other";
    return &registry_.counter(id, {model_, group_, label});
  });
}

void GroupMetrics::AddDropped(int rank, const v1::BatchStatistics& statistics) {
  int64_t dropped = 0;
  for (const v1::StackStatistics& stack : statistics.stacks()) dropped += stack.dropped_ids();
  OfRank(MetricId::kGroupDroppedIds, rank, &dropped_).Increment(static_cast<double>(dropped));
}

void GroupMetrics::AddFailure(absl::StatusCode code) {
  registry_.counter(MetricId::kGroupFailures, {model_, group_, CodeName(code)}).Increment();
}

MetricSnapshot::MetricSnapshot(
    const std::vector<std::weak_ptr<prometheus::Collectable>>& collectables)
    : series_(MetricCatalogue().size()) {
  std::map<std::string_view, const MetricInfo*> by_name;
  for (const MetricInfo& metric : MetricCatalogue()) by_name[metric.name] = &metric;
  for (const auto& weak : collectables) {
    const auto collectable = weak.lock();
    if (collectable == nullptr) continue;
    for (prometheus::MetricFamily& family : collectable->Collect()) {
      const auto found = by_name.find(family.name);
      if (found == by_name.end()) continue;
      const MetricInfo& metric = *found->second;
      std::vector<Series>& all = series_[static_cast<size_t>(metric.id)];
      for (prometheus::ClientMetric& from : family.metric) {
        all.push_back(MakeSeries(metric, std::move(from)));
      }
      std::sort(all.begin(), all.end(),
                [](const Series& a, const Series& b) { return a.labels < b.labels; });
    }
  }
}

const MetricSnapshot::Series* MetricSnapshot::Find(MetricId id,
                                                   const std::vector<std::string>& labels) const {
  const std::vector<Series>& all = All(id);
  const auto found = std::lower_bound(
      all.begin(), all.end(), labels,
      [](const Series& series, const auto& wanted) { return series.labels < wanted; });
  return found == all.end() || found->labels != labels ? nullptr : &*found;
}

double MetricSnapshot::Value(MetricId id, const std::vector<std::string>& labels) const {
  const Series* const series = Find(id, labels);
  return series == nullptr ? 0 : series->value;
}

}  // namespace emberd::ops
