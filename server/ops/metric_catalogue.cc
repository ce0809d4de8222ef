#include "server/ops/metric_catalogue.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace emberd::ops {
namespace {

using enum MetricId;
using enum MetricType;

constexpr MetricInfo kCatalogue[] = {
    // Requests. `method` is "Service/Method"; `code` is a gRPC status code's name.
    {kRpcs,
     "emberd_rpcs_total",
     kCounter,
     {"method", "code"},
     "1",
     "Requests answered, by status code."},
    {kRpcSeconds,
     "emberd_rpc_duration_seconds",
     kHistogram,
     {"method"},
     "seconds",
     "Time from the arrival of a request until its answer was handed over."},
    {kRpcRequestBytes,
     "emberd_rpc_request_bytes_total",
     kCounter,
     {"method"},
     "bytes",
     "Bytes of the requests answered."},
    {kRpcResponseBytes,
     "emberd_rpc_response_bytes_total",
     kCounter,
     {"method"},
     "bytes",
     "Bytes of the answers."},
    {kStageSeconds,
     "emberd_stage_duration_seconds",
     kHistogram,
     {"stage"},
     "seconds",
     "Time that a coordinator's request spent in one stage of Lookup or ApplyGradients."},

    // What a server holds. `server` is "coordinator-I" or "shard-I".
    {kInFlightRequests,
     "emberd_in_flight_requests",
     kGauge,
     {"server"},
     "1",
     "Requests being worked on."},
    {kInFlightBytes,
     "emberd_in_flight_bytes",
     kGauge,
     {"server"},
     "bytes",
     "Bytes of the requests being worked on."},
    {kModels, "emberd_models", kGauge, {"server"}, "1", "Models declared."},
    {kTableBytes,
     "emberd_table_bytes",
     kGauge,
     {"server"},
     "bytes",
     "Bytes reserved for weights and optimizer slots."},
    {kTableBudgetBytes,
     "emberd_table_budget_bytes",
     kGauge,
     {"server"},
     "bytes",
     "Bytes that weights and optimizer slots may take."},
    {kBatches,
     "emberd_batches",
     kGauge,
     {"server"},
     "1",
     "Batches kept between Lookup and ApplyGradients."},
    {kBatchBytes,
     "emberd_batch_bytes",
     kGauge,
     {"server"},
     "bytes",
     "Bytes of the batches kept between Lookup and ApplyGradients."},
    {kBatchBudgetBytes,
     "emberd_batch_budget_bytes",
     kGauge,
     {"server"},
     "bytes",
     "Bytes that kept batches may take."},
    {kBatchesExpired,
     "emberd_batches_expired_total",
     kCounter,
     {"server"},
     "1",
     "Batches dropped because they were neither applied nor released in time."},
    {kReplays,
     "emberd_replays_total",
     kCounter,
     {"server"},
     "1",
     "Retries of a finished mutation that were answered from the record."},

    // What a coordinator learns about each batch.
    {kBatchMinibatches,
     "emberd_batch_minibatches",
     kHistogram,
     {"model"},
     "1",
     "Mini-batches of a batch."},
    {kBatchIds,
     "emberd_batch_ids",
     kHistogram,
     {"model", "stack"},
     "1",
     "Distinct (sample, id) pairs of a batch."},
    {kBatchUniqueIds,
     "emberd_batch_unique_ids",
     kHistogram,
     {"model", "stack"},
     "1",
     "Distinct ids of a batch, as counted for the limits."},
    {kBatchDuplicateIds,
     "emberd_batch_duplicate_ids",
     kHistogram,
     {"model", "stack"},
     "1",
     "Ids of a batch that merged into another of their sample."},
    {kBatchMaxIds,
     "emberd_batch_max_ids_per_partition",
     kHistogram,
     {"model", "stack"},
     "1",
     "Most distinct (sample, id) pairs that a source slot of a batch sent to one partition."},
    {kBatchMaxUniqueIds,
     "emberd_batch_max_unique_ids_per_partition",
     kHistogram,
     {"model", "stack"},
     "1",
     "Most distinct ids that a source slot of a batch sent to one partition."},
    {kBatchBufferCells,
     "emberd_batch_required_buffer_size",
     kHistogram,
     {"model", "stack"},
     "1",
     "Entries of the CSR buffers of a batch, pads included."},
    {kDroppedIds,
     "emberd_dropped_ids_total",
     kCounter,
     {"model", "stack"},
     "1",
     "Ids dropped where the configuration allows it."},

    // Training groups. `rank` and `group` are "other" beyond a fixed number.
    {kGroupSteps,
     "emberd_group_steps_total",
     kCounter,
     {"model", "group"},
     "1",
     "Updates made by ranks of a training group."},
    {kGroupStageSeconds,
     "emberd_group_stage_duration_seconds",
     kHistogram,
     {"model", "group", "stage"},
     "seconds",
     "Time of a rank's lookup or update in one stage: preprocess, wait_for_ranks, wait_for_update, "
     "gather, combine, apply."},
    {kGroupLastArrivals,
     "emberd_group_last_arrivals_total",
     kCounter,
     {"model", "group", "rank"},
     "1",
     "Requests in which this rank came last where the ranks waited for each other."},
    {kGroupFailures,
     "emberd_group_failures_total",
     kCounter,
     {"model", "group", "code"},
     "1",
     "Streams of a training group that ended with an error, by status code."},

    // What a shard does.
    {kRowsGathered,
     "emberd_rows_gathered_total",
     kCounter,
     {"shard", "model", "stack"},
     "1",
     "Rows read for lookups, one for each entry of a batch."},
    {kRowsUpdated,
     "emberd_rows_updated_total",
     kCounter,
     {"shard", "model"},
     "1",
     "Rows written by optimizers."},
    {kRowsSkipped,
     "emberd_rows_skipped_total",
     kCounter,
     {"shard", "model"},
     "1",
     "Rows left as they were because their summed gradient was not finite."},
    {kShardSentBytes,
     "emberd_shard_sent_bytes_total",
     kCounter,
     {"shard", "model", "stack", "mode"},
     "bytes",
     "Bytes of looked-up rows that a shard sent, as partial_sums or as unique_rows."},
    {kShardReceivedBytes,
     "emberd_shard_received_bytes_total",
     kCounter,
     {"shard", "model", "stack"},
     "bytes",
     "Bytes of batches and gradients that a shard received."},

    // A coordinator's calls to shards.
    {kShardReachable,
     "emberd_shard_reachable",
     kGauge,
     {"shard"},
     "1",
     "1 if the coordinator's last call to the shard got through, else 0."},
    {kShardCalls,
     "emberd_shard_calls_total",
     kCounter,
     {"shard", "method", "code"},
     "1",
     "Calls to a shard, by status code."},
    {kShardCallSeconds,
     "emberd_shard_call_duration_seconds",
     kHistogram,
     {"shard", "method"},
     "seconds",
     "Time that a call to a shard took, as its coordinator saw it."},

    // The process, under the names that other exporters use too.
    {kBuildInfo,
     "emberd_build_info",
     kGauge,
     {"version", "role"},
     "1",
     "Always 1; the labels say what runs here."},
    {kProcessStartSeconds,
     "process_start_time_seconds",
     kGauge,
     {},
     "seconds",
     "Start of the process, in seconds since 1970."},
    {kProcessCpuSeconds,
     "process_cpu_seconds_total",
     kCounter,
     {},
     "seconds",
     "User and system CPU time."},
    {kProcessResidentBytes,
     "process_resident_memory_bytes",
     kGauge,
     {},
     "bytes",
     "Memory that the process has in RAM."},
    {kProcessOpenFds, "process_open_fds", kGauge, {}, "1", "Open file descriptors."},
};

constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kCatalogue); ++i) {
    if (kCatalogue[i].id != static_cast<MetricId>(i)) return false;
  }
  return std::size(kCatalogue) == static_cast<size_t>(kProcessOpenFds) + 1;
}
static_assert(InOrder(), "the catalogue has one entry per MetricId, in the order of the enum");

std::string_view TypeName(MetricType type) {
  switch (type) {
    case kCounter:
      return "counter";
    case kGauge:
      return "gauge";
    case kHistogram:
      return "histogram";
  }
  return "";
}

std::string Text(std::string_view text) { return std::string(text); }

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
  return metric.unit == "seconds" ? *kSeconds : *kCounts;
}

std::string MetricCatalogueMarkdown() {
  std::string page =
      "| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n";
  for (const MetricInfo& metric : kCatalogue) {
    absl::StrAppend(&page, "| `", Text(metric.name), "` | ", Text(TypeName(metric.type)), " | ",
                    Text(metric.unit), " | ", absl::StrJoin(metric.LabelNames(), ", "), " | ",
                    Text(metric.help), " |\n");
  }
  return page;
}

}  // namespace emberd::ops
