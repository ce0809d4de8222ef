#include "server/ops/metric_catalogue.h"

#include <cstddef>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace emberd::ops {
namespace {

using enum MetricId;

using Labels = std::array<std::string_view, 4>;

constexpr MetricInfo Counter(MetricId id, std::string_view name, Labels labels,
                             std::string_view unit, std::string_view help) {
  return {id, name, MetricType::kCounter, labels, unit, help};
}

constexpr MetricInfo Gauge(MetricId id, std::string_view name, Labels labels, std::string_view unit,
                           std::string_view help) {
  return {id, name, MetricType::kGauge, labels, unit, help};
}

constexpr MetricInfo Histogram(MetricId id, std::string_view name, Labels labels,
                               std::string_view unit, std::string_view help) {
  return {id, name, MetricType::kHistogram, labels, unit, help};
}

constexpr MetricInfo kCatalogue[] = {
    // Requests. `method` is "Service/Method"; `code` is a gRPC status code's name.
    Counter(kRpcs, "emberd_rpcs_total", {"method", "code"}, "1",
            "Requests answered, by status code."),
    Histogram(kRpcSeconds, "emberd_rpc_duration_seconds", {"method"}, "seconds",
              "Time from the arrival of a request until its answer was sent."),
    Counter(kRpcRequestBytes, "emberd_rpc_request_bytes_total", {"method"}, "bytes",
            "Bytes of requests received."),
    Counter(kRpcResponseBytes, "emberd_rpc_response_bytes_total", {"method"}, "bytes",
            "Bytes of answers sent."),
    Histogram(kStageSeconds, "emberd_stage_duration_seconds", {"stage"}, "seconds",
              "Time that a coordinator's request spent in one stage of Lookup or ApplyGradients."),

    // What a server holds. `server` is "coordinator-I" or "shard-I".
    Gauge(kInFlightRequests, "emberd_in_flight_requests", {"server"}, "1", "Requests in progress."),
    Gauge(kInFlightBytes, "emberd_in_flight_bytes", {"server"}, "bytes",
          "Bytes of the requests in progress, and of answers until they are sent."),
    Gauge(kInFlightBudgetBytes, "emberd_in_flight_budget_bytes", {"server"}, "bytes",
          "Limit of emberd_in_flight_bytes; above it, requests are refused."),
    Gauge(kQueuedRequests, "emberd_queued_requests", {"server"}, "1",
          "Requests that wait for a thread."),
    Gauge(kTrainStreams, "emberd_train_streams", {"server"}, "1", "Train streams that are open."),
    Gauge(kDraining, "emberd_draining", {"server"}, "1",
          "1 while the server takes no new requests because it drains, else 0."),
    Gauge(kModels, "emberd_models", {"server"}, "1", "Models declared."),
    Gauge(kModelLost, "emberd_model_lost", {"model"}, "1",
          "1 while shards have lost rows of the model, and every call on it ends with "
          "DATA_LOSS, else 0."),
    Counter(
        kModelRecoveries, "emberd_model_recoveries_total", {"model"}, "1",
        "Times that the coordinator brought a model that had lost rows back from a checkpoint."),
    Counter(kCheckpoints, "emberd_checkpoints_total", {"model"}, "1",
            "Checkpoints of the model that the coordinator has saved."),
    Counter(kCheckpointFailures, "emberd_checkpoint_failures_total", {"model"}, "1",
            "Checkpoints of the model that could not be saved."),
    Counter(kCheckpointBytes, "emberd_checkpoint_bytes_total", {"model"}, "bytes",
            "Bytes of the checkpoints that the coordinator has saved."),
    Gauge(kCheckpointStoredBytes, "emberd_checkpoint_stored_bytes", {"model"}, "bytes",
          "Bytes of all checkpoints of the model on the disk, when the coordinator last saved or "
          "deleted one."),
    Gauge(
        kCheckpointSeconds, "emberd_checkpoint_last_timestamp_seconds", {"model"}, "seconds",
        "When the coordinator's newest checkpoint of the model was saved, in seconds since 1970."),
    Gauge(kCheckpointPauseSeconds, "emberd_checkpoint_last_pause_seconds", {"model"}, "seconds",
          "How long updates were paused for the newest checkpoint."),
    Gauge(kTableBytes, "emberd_table_bytes", {"server"}, "bytes",
          "Bytes reserved for weights and optimizer slots."),
    Gauge(kTableBudgetBytes, "emberd_table_budget_bytes", {"server"}, "bytes",
          "Bytes that weights and optimizer slots may take."),
    Gauge(kTableResidentBytes, "emberd_table_resident_bytes", {"server"}, "bytes",
          "Of the bytes reserved, those of models that are not evicted (ClusterConfig.eviction)."),
    Gauge(kTablePinnedBytes, "emberd_table_pinned_bytes", {"server"}, "bytes",
          "Of the bytes reserved, those of models that are pinned, and never evicted."),
    Gauge(kTableHostBytes, "emberd_table_host_bytes", {"server"}, "bytes",
          "Bytes of evicted models that are kept in memory."),
    Gauge(kTableSpilledBytes, "emberd_table_spilled_bytes", {"server"}, "bytes",
          "Bytes of evicted rows on disk."),
    Counter(kEvictions, "emberd_evictions_total", {"server"}, "1",
            "Times that a model was evicted to make room for another."),
    Counter(kReturns, "emberd_evicted_returns_total", {"server"}, "1",
            "Times that an evicted model came back because it was used."),
    Counter(kMemoryFailures, "emberd_memory_failures_total", {"server"}, "1",
            "Times that a model could not be given its memory."),
    Gauge(kLogBytes, "emberd_log_bytes", {"server"}, "bytes",
          "Bytes of the shard's log (storage.durability LOG)."),
    Gauge(kLogRefuses, "emberd_log_refuses", {"server"}, "1",
          "1 while the shard refuses changes because its log cannot be written or read, else 0."),
    Gauge(kRecovering, "emberd_recovering", {"server"}, "1",
          "1 while the shard reads its checkpoints and its log after a start, else 0."),
    Gauge(kBatches, "emberd_batches", {"server"}, "1",
          "Batches kept between Lookup and ApplyGradients."),
    Gauge(kBatchBytes, "emberd_batch_bytes", {"server"}, "bytes",
          "Bytes of the batches kept between Lookup and ApplyGradients."),
    Gauge(kBatchBudgetBytes, "emberd_batch_budget_bytes", {"server"}, "bytes",
          "Bytes that kept batches may take."),
    Gauge(kMaxBatches, "emberd_max_batches", {"server"}, "1", "Batches that may be kept at once."),
    Counter(kBatchesExpired, "emberd_batches_expired_total", {"server"}, "1",
            "Batches dropped because they were neither applied nor released in time."),
    Counter(kReplays, "emberd_replays_total", {"server"}, "1",
            "Retries of a finished mutation that were answered from the record."),
    Counter(kLaneCalls, "emberd_lane_calls_total", {"server"}, "1",
            "Of the requests, small ones of this machine that did not come by gRPC."),
    Gauge(kPrograms, "emberd_programs", {"server"}, "1", "Compiled programs that are kept."),
    Counter(kProgramCompilations, "emberd_program_compilations_total", {"server"}, "1",
            "Programs that were compiled; those that were found compiled are not counted."),
    Gauge(kProgramHandles, "emberd_program_handles", {"server"}, "1",
          "Batches and results of programs that clients have handles of."),
    Counter(kProgramHandlesExpired, "emberd_program_handles_expired_total", {"server"}, "1",
            "Handles released because their client made no call in time."),

    // What a coordinator learns about each batch.
    Histogram(kBatchMinibatches, "emberd_batch_minibatches", {"model"}, "1",
              "Mini-batches of a batch."),
    Counter(kExamples, "emberd_examples_total", {"model"}, "1",
            "Examples looked up: of each batch, the samples of the feature with the most samples."),
    Counter(kMissingGradients, "emberd_missing_gradients_total", {"model"}, "1",
            "Features of updates that came without a gradient, which counts as zero."),
    Histogram(kBatchIds, "emberd_batch_ids", {"model", "stack"}, "1",
              "Distinct (sample, id) pairs of a batch."),
    Histogram(kBatchUniqueIds, "emberd_batch_unique_ids", {"model", "stack"}, "1",
              "Distinct ids of a batch, as counted for the limits."),
    Histogram(kBatchDuplicateIds, "emberd_batch_duplicate_ids", {"model", "stack"}, "1",
              "Ids of a batch that were merged into an equal one of their sample."),
    Histogram(
        kBatchMaxIds, "emberd_batch_max_ids_per_partition", {"model", "stack"}, "1",
        "Most distinct (sample, id) pairs that a source slot of a batch sent to one partition."),
    Histogram(kBatchMaxUniqueIds, "emberd_batch_max_unique_ids_per_partition", {"model", "stack"},
              "1", "Most distinct ids that a source slot of a batch sent to one partition."),
    Histogram(kBatchBufferCells, "emberd_batch_required_buffer_size", {"model", "stack"}, "1",
              "Entries of the CSR buffers of a batch, padding included."),
    Counter(kDroppedIds, "emberd_dropped_ids_total", {"model", "stack"}, "1",
            "Ids dropped where the configuration allows it."),
    Histogram(kBatchImbalance, "emberd_batch_imbalance_ratio", {"model", "stack"}, "ratio",
              "Ids of a batch in its fullest partition, divided by the mean over the partitions; 1 "
              "is even."),
    Counter(kBatchesRefused, "emberd_batches_refused_total", {"model"}, "1",
            "Batches refused because no cut of the vocabulary keeps them within the limits."),
    Gauge(kStackMaxIds, "emberd_stack_max_ids_per_partition", {"model", "stack"}, "1",
          "Limit on emberd_batch_max_ids_per_partition; 0: none."),
    Gauge(kStackMaxUniqueIds, "emberd_stack_max_unique_ids_per_partition", {"model", "stack"}, "1",
          "Limit on emberd_batch_max_unique_ids_per_partition; 0: none."),

    // Training groups. `rank` and `group` are "other" beyond a fixed number.
    Counter(kGroupSteps, "emberd_group_steps_total", {"model", "group"}, "1",
            "Updates sent by ranks of a training group."),
    Histogram(kGroupStageSeconds, "emberd_group_stage_duration_seconds",
              {"model", "group", "stage"}, "seconds",
              "Time of a rank's lookup or update in one stage: preprocess, wait_for_ranks, "
              "wait_for_update, gather, combine, apply."),
    Counter(kGroupLastArrivals, "emberd_group_last_arrivals_total", {"model", "group", "rank"}, "1",
            "Exchanges among the ranks of a group in which this rank came last."),
    Counter(kGroupFailures, "emberd_group_failures_total", {"model", "group", "code"}, "1",
            "Streams of a training group that ended with an error, by status code."),

    // What a shard does.
    Counter(kRowsGathered, "emberd_rows_gathered_total", {"shard", "model", "stack"}, "1",
            "Rows read for lookups, one for each entry of a batch."),
    Counter(kRowsUpdated, "emberd_rows_updated_total", {"shard", "model", "stack"}, "1",
            "Rows written by optimizers."),
    Counter(kRowsSkipped, "emberd_rows_skipped_total", {"shard", "model", "stack"}, "1",
            "Rows left as they were because their summed gradient was not finite."),
    Counter(
        kPartitionRowsGathered, "emberd_partition_rows_gathered_total", {"shard", "partition"}, "1",
        "Rows read for lookups in one partition; partitions are counted over the whole cluster."),
    Counter(kPartitionRowsUpdated, "emberd_partition_rows_updated_total", {"shard", "partition"},
            "1", "Rows written by optimizers in one partition."),
    Gauge(
        kHotRowsShare, "emberd_hot_rows_share", {"shard", "model", "table", "top"}, "1",
        "Least share of a table's lookups on this shard, since its start, that go to its 1, 10 or "
        "100 hottest rows; from a sample."),
    Counter(kShardSentBytes, "emberd_shard_sent_bytes_total", {"shard", "model", "stack", "mode"},
            "bytes",
            "Bytes of looked-up rows that a shard sent, as partial_sums or as unique_rows."),
    Counter(kShardReceivedBytes, "emberd_shard_received_bytes_total", {"shard", "model", "stack"},
            "bytes", "Bytes of batches that a shard received, and of gradients as float32."),

    // A coordinator's calls to shards.
    Gauge(kShardReachable, "emberd_shard_reachable", {"shard"}, "1",
          "1 if the coordinator's last call reached the shard, else 0."),
    Counter(kShardCalls, "emberd_shard_calls_total", {"shard", "method", "code"}, "1",
            "Calls to a shard, by status code."),
    Histogram(kShardCallSeconds, "emberd_shard_call_duration_seconds", {"shard", "method"},
              "seconds", "Time that a call to a shard took, as its coordinator saw it."),

    // The process, under the names that other exporters use too.
    Gauge(kBuildInfo, "emberd_build_info", {"version", "role"}, "1",
          "Always 1; the labels say what runs here."),
    Gauge(kProcessStartSeconds, "process_start_time_seconds", {}, "seconds",
          "Start of the process, in seconds since 1970."),
    Counter(kProcessCpuSeconds, "process_cpu_seconds_total", {}, "seconds",
            "User and system CPU time."),
    Gauge(kProcessResidentBytes, "process_resident_memory_bytes", {}, "bytes",
          "Memory that the process has in RAM."),
    Gauge(kProcessHugePageBytes, "process_huge_page_bytes", {}, "bytes",
          "The part of the memory in RAM that is in huge pages."),
    Gauge(kProcessOpenFds, "process_open_fds", {}, "1", "Open file descriptors."),
};

constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kCatalogue); ++i) {
    if (kCatalogue[i].id != static_cast<MetricId>(i)) return false;
  }
  return std::size(kCatalogue) == static_cast<size_t>(kProcessOpenFds) + 1;
}
static_assert(InOrder(), "the catalogue has one entry per MetricId, in the order of the enum");

// The metrics from `first` to the next group.
struct Group {
  MetricId first;
  std::string_view title;
  std::string_view about;
};

constexpr Group kGroups[] = {
    {MetricId::kRpcs, "Requests",
     "On every process, of the services that it serves. `method` is `Service/Method`, `code` the "
     "name of a gRPC status code. The stages are a coordinator's: of a lookup `decode`, "
     "`preprocess`, `gather_wait`, `combine`, `encode`; of an update `decode`, `encode`, `stage`, "
     "`commit`; of a training stream also `wait_for_ranks` and `wait_for_update`."},
    {MetricId::kInFlightRequests, "What a server holds, against its budgets",
     "`server` is `coordinator-I` or `shard-I`. A coordinator holds no tables: its figures are "
     "what "
     "the models that it knows take on all shards, and have no budget."},
    {MetricId::kBatchMinibatches, "Batches",
     "Of the lookups of one coordinator. Beyond 256 pairs, model and stack are `other`."},
    {MetricId::kGroupSteps, "Training groups",
     "Of the ranks that one coordinator serves. Beyond 64 pairs, model and group are `other`; so "
     "is a rank from 64 on."},
    {MetricId::kRowsGathered, "Shards",
     "Beyond 256 pairs, model and stack are `other`; tables beyond 256 are not shown."},
    {MetricId::kShardReachable, "Calls to shards", "As a coordinator sees them."},
    {MetricId::kBuildInfo, "Processes", "Under the names that other exporters use too."},
};

std::string Text(std::string_view text) { return std::string(text); }

std::string_view TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

const Group* GroupThatBegins(MetricId id) {
  for (const Group& group : kGroups) {
    if (group.first == id) return &group;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> MetricInfo::LabelNames() const {
  std::vector<std::string> names;
  for (std::string_view label : labels) {
    if (!label.empty()) names.emplace_back(label);
  }
  return names;
}

absl::Span<const MetricInfo> MetricCatalogue() { return kCatalogue; }

const MetricInfo& Describe(MetricId id) { return kCatalogue[static_cast<size_t>(id)]; }

const std::vector<double>& BucketBounds(const MetricInfo& metric) {
  static const auto* const kSeconds =
      new std::vector<double>{5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05,
                              0.1,  0.25, 0.5,    1,    2.5,  5,      10,   25,   50};
  static const auto* const kCounts = new std::vector<double>{
      1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216};
  static const auto* const kRatios = new std::vector<double>{
      1, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 16, 64, 256, 1024};
  if (metric.unit == "seconds") return *kSeconds;
  return metric.unit == "ratio" ? *kRatios : *kCounts;
}

std::string MetricReference() {
  std::string page =
      "# Metrics of emberd\n\n"
      "Every process with an `http_address` serves them under `/metrics`, as text for Prometheus. "
      "Counters and\nhistograms start at 0 with the process. A histogram `h` has the series "
      "`h_bucket`, "
      "`h_sum` and `h_count`. A series appears\nwhen there is something to count: a method that "
      "was never called has none.\n\n"
      "This page is printed by `emberd metrics`.\n";
  for (const MetricInfo& metric : MetricCatalogue()) {
    if (const Group* group = GroupThatBegins(metric.id); group != nullptr) {
      absl::StrAppend(&page, "\n## ", Text(group->title), "\n\n", Text(group->about), "\n\n",
                      "| metric | type | unit | labels | meaning |\n",
                      "| --- | --- | --- | --- | --- |\n");
    }
    absl::StrAppend(&page, "| `", Text(metric.name), "` | ", Text(TypeName(metric.type)), " | ",
                    Text(metric.unit), " | ", absl::StrJoin(metric.LabelNames(), ", "), " | ",
                    Text(metric.help), " |\n");
  }
  return page;
}

}  // namespace emberd::ops
