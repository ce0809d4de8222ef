#include "server/ops/metrics.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <dirent.h>
#include <prometheus/metric_family.h>
#include <time.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/ops/metric_catalogue.h"
#include "server/ops/rpc_names.h"

namespace emberd::ops {
namespace {

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

std::shared_ptr<prometheus::Collectable> MakeProcessMetrics() {
  return std::make_shared<ProcessMetrics>();
}

namespace {

using Clock = std::chrono::steady_clock;

// The child in `slot`, made by `make` on first use. Two threads may both call make: it gives both
// the same child.
template <typename Child, typename Make>
Child& Cached(std::atomic<Child*>& slot, Make make) {
  Child* child = slot.load(std::memory_order_acquire);
  if (child == nullptr) {
    child = &make();
    slot.store(child, std::memory_order_release);
  }
  return *child;
}

size_t CodeIndex(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kCodeCount ? index : static_cast<size_t>(absl::StatusCode::kUnknown);
}

std::string Name(std::string_view name) { return std::string(name); }

prometheus::Histogram& StageHistogram(MetricRegistry& registry, const std::string& model,
                                      const std::string& group, const char* stage) {
  return registry.histogram(MetricId::kGroupStageSeconds, {model, group, stage});
}

double Seconds(int64_t us) { return static_cast<double>(us) * 1e-6; }

}  // namespace

LabelledMetrics::LabelledMetrics(MetricRegistry& registry, const std::vector<std::string>& names,
                                 const std::vector<std::string>& values, bool gauges)
    : gauges_(MetricCatalogue().size()),
      counters_(MetricCatalogue().size()),
      histograms_(MetricCatalogue().size()) {
  for (const MetricInfo& metric : MetricCatalogue()) {
    if (metric.LabelNames() != names) continue;
    const auto index = static_cast<size_t>(metric.id);
    switch (metric.type) {
      case MetricType::kGauge:
        if (gauges) gauges_[index] = &registry.gauge(metric.id, values);
        break;
      case MetricType::kCounter:
        counters_[index] = &registry.counter(metric.id, values);
        break;
      case MetricType::kHistogram:
        histograms_[index] = &registry.histogram(metric.id, values);
        break;
    }
  }
}

void ServerMetrics::SetBudgets(const v1::BudgetConfig& budgets) {
  Set(MetricId::kMaxBatches, budgets.max_batches());
  Set(MetricId::kBatchBudgetBytes, static_cast<double>(budgets.batch_bytes()));
  Set(MetricId::kInFlightBudgetBytes, static_cast<double>(budgets.in_flight_bytes()));
}

RpcTimer::RpcTimer(ServerMetrics* server, Rpc rpc, int64_t request_bytes)
    : server_(server), rpc_(rpc), start_(Clock::now()) {
  server_->gauges_[static_cast<size_t>(MetricId::kInFlightRequests)]->Increment();
  AddRequestBytes(request_bytes);
}

RpcTimer::~RpcTimer() { Finish(absl::StatusCode::kCancelled); }

void RpcTimer::AddRequestBytes(int64_t bytes) {
  if (bytes > 0) server_->metrics_->AddRpcBytes(rpc_, bytes, 0);
}

void RpcTimer::AddResponseBytes(int64_t bytes) { server_->metrics_->AddRpcBytes(rpc_, 0, bytes); }

void RpcTimer::Finish(absl::StatusCode code) {
  if (finished_) return;
  finished_ = true;
  server_->gauges_[static_cast<size_t>(MetricId::kInFlightRequests)]->Decrement();
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  server_->metrics_->ObserveRpc(rpc_, code, elapsed.count(), 0, 0);
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

ShardLinkMetrics::ShardLinkMetrics(MetricRegistry& registry, int shard)
    : registry_(registry),
      shard_(std::to_string(shard)),
      reachable_(registry.gauge(MetricId::kShardReachable, {shard_})) {}

void ShardLinkMetrics::Observe(Rpc rpc, absl::StatusCode code, double seconds) {
  const auto method = static_cast<size_t>(rpc);
  const std::string_view name = RpcName(rpc);
  Cached(
      seconds_[method],
      [&]() -> auto& {
        return registry_.histogram(MetricId::kShardCallSeconds, {shard_, Name(name)});
      })
      .Observe(seconds);
  Cached(
      calls_[method][CodeIndex(code)],
      [&]() -> auto& {
        return registry_.counter(MetricId::kShardCalls, {shard_, Name(name), Name(CodeName(code))});
      })
      .Increment();
  SetReachable(code != absl::StatusCode::kUnavailable &&
               code != absl::StatusCode::kDeadlineExceeded);
}

Metrics::Metrics(const std::string& role) : process_(MakeProcessMetrics()) {
  registry_.gauge(MetricId::kBuildInfo, {EMBERD_VERSION, role}).Set(1);
  for (size_t i = 0; i < kStageCount; ++i) {
    const std::string name = Name(StageName(static_cast<Stage>(i)));
    stages_[i] = &registry_.histogram(MetricId::kStageSeconds, {name});
  }
}

ServerMetrics* Metrics::Server(const std::string& kind, int index) {
  const std::string name = kind + "-" + std::to_string(index);
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ServerMetrics>& server = servers_[name];
  if (server == nullptr) server.reset(new ServerMetrics(this, registry_, name));
  return server.get();
}

ShardLinkMetrics* Metrics::ShardLink(int shard) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ShardLinkMetrics>& link = links_[shard];
  if (link == nullptr) link.reset(new ShardLinkMetrics(registry_, shard));
  return link.get();
}

ModelMetrics* Metrics::Model(const std::string& model, const std::vector<std::string>& stacks) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ModelMetrics> metrics(new ModelMetrics(registry_, StackLabels(model, "")[0]));
  for (const std::string& stack : stacks) {
    const std::vector<std::string> labels = StackLabels(model, stack);
    metrics->stacks_.emplace_back(registry_, std::vector<std::string>{"model", "stack"}, labels,
                                  /*gauges=*/labels[0] != "other");
  }
  return models_.emplace_back(std::move(metrics)).get();
}

ShardModelMetrics* Metrics::ShardModel(int shard, const std::string& model,
                                       const std::vector<std::string>& stacks) {
  absl::MutexLock lock(&mutex_);
  const std::string index = std::to_string(shard);
  auto metrics = std::make_unique<ShardModelMetrics>();
  for (const std::string& stack : stacks) {
    std::vector<std::string> labels = StackLabels(model, stack);
    labels.insert(labels.begin(), index);
    const auto sent = [&](const char* mode) -> prometheus::Counter* {
      std::vector<std::string> with_mode = labels;
      with_mode.push_back(mode);
      return &registry_.counter(MetricId::kShardSentBytes, with_mode);
    };
    metrics->stacks_.push_back({LabelledMetrics(registry_, {"shard", "model", "stack"}, labels),
                                sent("partial_sums"), sent("unique_rows")});
  }
  return shard_models_.emplace_back(std::move(metrics)).get();
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

std::vector<std::string> Metrics::StackLabels(const std::string& model, const std::string& stack) {
  std::vector<std::string> labels = {model, stack};
  if (stack_labels_.count(labels) == 0) {
    if (stack_labels_.size() >= kMaxStackLabels) return {"other", "other"};
    stack_labels_.insert(labels);
  }
  return labels;
}

void Metrics::ObserveRpc(Rpc rpc, absl::StatusCode code, double seconds, int64_t request_bytes,
                         int64_t response_bytes) {
  AddRpcBytes(rpc, request_bytes, response_bytes);
  RpcChildren& children = rpcs_[static_cast<size_t>(rpc)];
  const std::string_view name = RpcName(rpc);
  Cached(
      children.seconds,
      [&]() -> auto& { return registry_.histogram(MetricId::kRpcSeconds, {Name(name)}); })
      .Observe(seconds);
  Cached(
      children.by_code[CodeIndex(code)],
      [&]() -> auto& {
        return registry_.counter(MetricId::kRpcs, {Name(name), Name(CodeName(code))});
      })
      .Increment();
}

void Metrics::AddRpcBytes(Rpc rpc, int64_t request_bytes, int64_t response_bytes) {
  RpcChildren& children = rpcs_[static_cast<size_t>(rpc)];
  const std::string_view name = RpcName(rpc);
  Cached(
      children.request_bytes,
      [&]() -> auto& { return registry_.counter(MetricId::kRpcRequestBytes, {Name(name)}); })
      .Increment(request_bytes);
  Cached(
      children.response_bytes,
      [&]() -> auto& { return registry_.counter(MetricId::kRpcResponseBytes, {Name(name)}); })
      .Increment(response_bytes);
}

void Metrics::ObserveStage(Stage stage, double seconds) {
  stages_[static_cast<size_t>(stage)]->Observe(seconds);
}

std::vector<std::weak_ptr<prometheus::Collectable>> Metrics::collectables() const {
  return {registry_.collectable(), process_};
}

GroupMetrics::GroupMetrics(MetricRegistry& registry, const std::string& model,
                           const std::string& group)
    : registry_(registry),
      model_(model),
      group_(group),
      steps_(registry.counter(MetricId::kGroupSteps, {model, group})),
      preprocess_(StageHistogram(registry, model, group, "preprocess")),
      wait_for_ranks_(StageHistogram(registry, model, group, "wait_for_ranks")),
      wait_for_update_(StageHistogram(registry, model, group, "wait_for_update")),
      gather_(StageHistogram(registry, model, group, "gather")),
      combine_(StageHistogram(registry, model, group, "combine")),
      apply_(StageHistogram(registry, model, group, "apply")) {}

void GroupMetrics::ObserveLookup(const v1::StepTimes& times) {
  preprocess_.Observe(Seconds(times.preprocess_us()));
  gather_.Observe(Seconds(times.shards_us()));
  combine_.Observe(Seconds(times.combine_us()));
  ObserveWaits(times);
}

void GroupMetrics::ObserveUpdate(const v1::StepTimes& times) {
  steps_.Increment();
  apply_.Observe(Seconds(times.shards_us()));
  ObserveWaits(times);
}

void GroupMetrics::ObserveWaits(const v1::StepTimes& times) {
  wait_for_update_.Observe(Seconds(times.wait_for_update_us()));
  if (times.slowest_rank() < 0) return;
  wait_for_ranks_.Observe(Seconds(times.wait_for_ranks_us()));
  const std::string rank =
      times.slowest_rank() < kMaxRankLabels ? std::to_string(times.slowest_rank()) : "other";
  registry_.counter(MetricId::kGroupLastArrivals, {model_, group_, rank}).Increment();
}

void GroupMetrics::AddFailure(absl::StatusCode code) {
  registry_.counter(MetricId::kGroupFailures, {model_, group_, std::string(CodeName(code))})
      .Increment();
}

}  // namespace emberd::ops
