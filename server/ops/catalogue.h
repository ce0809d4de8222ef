// What a process can do and what it counts, by name: every RPC with the role that it needs, a
// coordinator's stages, and every metric that a process may expose. The single lists that the code,
// the reference page, the logs and the tests share.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace emberd::ops {

// RPC(service, method, role) of each public rpc: service names it without "Service", role is the
// least that may call it. ReleaseBatch takes any batch of the model, also one that a trainer waits
// to apply.
#define EMBERD_PUBLIC_RPCS(RPC)             \
  RPC(Embedding, DeclareModel, TRAINER)     \
  RPC(Embedding, DescribeModel, READER)     \
  RPC(Embedding, Lookup, READER)            \
  RPC(Embedding, ApplyGradients, TRAINER)   \
  RPC(Embedding, Train, TRAINER)            \
  RPC(Embedding, ReleaseBatch, TRAINER)     \
  RPC(Embedding, ReadRows, READER)          \
  RPC(Embedding, AssignRows, LOADER)        \
  RPC(Embedding, ExportTable, READER)       \
  RPC(Embedding, ShareMemory, READER)       \
  RPC(Admin, GetStatus, READER)             \
  RPC(Admin, GetLimits, READER)             \
  RPC(Admin, SetLimits, ADMIN)              \
  RPC(Admin, GetMetrics, READER)            \
  RPC(Admin, GetStats, READER)              \
  RPC(Admin, Drain, ADMIN)                  \
  RPC(Admin, DropModel, ADMIN)              \
  RPC(Admin, ResetModel, ADMIN)             \
  RPC(Admin, DropGroup, ADMIN)              \
  RPC(Admin, ChangeMemory, ADMIN)           \
  RPC(Checkpoint, SaveCheckpoint, TRAINER)  \
  RPC(Checkpoint, RestoreCheckpoint, ADMIN) \
  RPC(Checkpoint, ServeCheckpoint, ADMIN)   \
  RPC(Checkpoint, VerifyCheckpoint, READER) \
  RPC(Checkpoint, MergeCheckpoint, ADMIN)   \
  RPC(Checkpoint, DiffCheckpoints, READER)  \
  RPC(Checkpoint, ListCheckpoints, READER)  \
  RPC(Checkpoint, GetCheckpoint, READER)    \
  RPC(Checkpoint, DeleteCheckpoint, ADMIN)  \
  RPC(Checkpoint, ExportCheckpoint, READER) \
  RPC(Program, Compile, TRAINER)            \
  RPC(Program, Release, TRAINER)            \
  RPC(Program, PrepareBatch, TRAINER)       \
  RPC(Program, Execute, TRAINER)            \
  RPC(Program, ExecuteChained, TRAINER)     \
  RPC(Program, ReadHandle, TRAINER)

// RPC(service, method) of those between the processes of a cluster, but for the control verbs of
// shards (server/host/verbs.h).
#define EMBERD_INTERNAL_RPCS(RPC) \
  RPC(Shard, Gather)              \
  RPC(Shard, Apply)               \
  RPC(Shard, ShareMemory)

// kLookup; kShardGather.
enum class Rpc {
#define EMBERD_RPC(service, method, role) k##method,
  EMBERD_PUBLIC_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
#define EMBERD_RPC(service, method) k##service##method,
      EMBERD_INTERNAL_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
};
// Other numbers are those of a shard's control verbs.
inline constexpr size_t kMaxShardVerbs = 32;
inline constexpr size_t kRpcCount =
    static_cast<size_t>(Rpc::kShardShareMemory) + 1 + kMaxShardVerbs;

// What a coordinator does to a request, in order: the first five to a Lookup; decode, encode, stage
// and commit to an ApplyGradients; both kinds of waiting are a training stream's.
enum class Stage {
  kDecode,         // bytes of the request to features or gradients
  kPreprocess,     // features to CSR
  kGatherWait,     // from the first call to a shard until the last partial sums are here
  kCombine,        // partial sums to activations
  kEncode,         // activations to the answer, or gradients to the shards' requests
  kStage,          // until every shard has checked the update
  kCommit,         // until every shard has made it
  kWaitForRanks,   // for the other members of the group
  kWaitForUpdate,  // a lookup for the update that it has to see, an update for the lookup that must
                   // not see it
};
inline constexpr size_t kStageCount = static_cast<size_t>(Stage::kWaitForUpdate) + 1;

// gRPC's codes are absl's.
inline constexpr size_t kCodeCount = static_cast<size_t>(absl::StatusCode::kUnauthenticated) + 1;

const std::string& RpcName(Rpc rpc);          // "EmbeddingService/Lookup"; of none: ""
Rpc ShardRpc(std::string_view verb);          // "OpenGroup": of ShardService
std::string_view StageName(Stage stage);      // "gather_wait"
std::string CodeName(absl::StatusCode code);  // "UNAVAILABLE"

// METRIC(id, type, name, labels, unit, help) of each metric, after the GROUP(title, about) that it
// belongs to. Units: "seconds", "bytes", "ratio" (to what is ideal), "1" for all else.
#define EMBERD_METRICS(GROUP, METRIC)                                                              \
  GROUP("Requests",                                                                                \
        "On every process, of the services that it serves. `method` is `Service/Method`, `code` "  \
        "the name of a gRPC status code. The stages are a coordinator's: of a lookup `decode`, "   \
        "`preprocess`, `gather_wait`, `combine`, `encode`; of an update `decode`, `encode`, "      \
        "`stage`, `commit`; of a training stream also `wait_for_ranks` and `wait_for_update`.")    \
  METRIC(kRpcs, Counter, "emberd_rpcs_total", "method, code", "1",                                 \
         "Requests answered, by status code.")                                                     \
  METRIC(kRpcSeconds, Histogram, "emberd_rpc_duration_seconds", "method", "seconds",               \
         "Time from the arrival of a request until its answer was sent.")                          \
  METRIC(kRpcRequestBytes, Counter, "emberd_rpc_request_bytes_total", "method", "bytes",           \
         "Bytes of requests received.")                                                            \
  METRIC(kRpcResponseBytes, Counter, "emberd_rpc_response_bytes_total", "method", "bytes",         \
         "Bytes of answers sent.")                                                                 \
  METRIC(kStageSeconds, Histogram, "emberd_stage_duration_seconds", "stage", "seconds",            \
         "Time that a coordinator's request spent in one stage of Lookup or ApplyGradients.")      \
  GROUP("What a server holds, against its budgets",                                                \
        "`server` is `coordinator-I` or `shard-I`. A coordinator holds no tables: its "            \
        "`emberd_table_bytes` is what the models that it knows take on all shards, and its other " \
        "figures of tables, evictions and logs are 0.")                                            \
  METRIC(kInFlightRequests, Gauge, "emberd_in_flight_requests", "server", "1",                     \
         "Requests in progress.")                                                                  \
  METRIC(kInFlightBytes, Gauge, "emberd_in_flight_bytes", "server", "bytes",                       \
         "Bytes of the requests in progress, and of answers until they are sent.")                 \
  METRIC(kInFlightBudgetBytes, Gauge, "emberd_in_flight_budget_bytes", "server", "bytes",          \
         "Limit of emberd_in_flight_bytes; above it, requests are refused.")                       \
  METRIC(kQueuedRequests, Gauge, "emberd_queued_requests", "server", "1",                          \
         "Requests that wait for a thread.")                                                       \
  METRIC(kTrainStreams, Gauge, "emberd_train_streams", "server", "1",                              \
         "Train streams that are open.")                                                           \
  METRIC(kDraining, Gauge, "emberd_draining", "server", "1",                                       \
         "1 while the server takes no new requests because it drains, else 0.")                    \
  METRIC(kModels, Gauge, "emberd_models", "server", "1", "Models declared.")                       \
  METRIC(kModelLost, Gauge, "emberd_model_lost", "model", "1",                                     \
         "1 while shards have lost rows of the model, and every call on it ends with DATA_LOSS, "  \
         "else 0; of `other`, how many models.")                                                   \
  METRIC(kModelRecoveries, Counter, "emberd_model_recoveries_total", "model", "1",                 \
         "Times that the coordinator brought a model that had lost rows back from a checkpoint.")  \
  METRIC(kCheckpoints, Counter, "emberd_checkpoints_total", "model", "1",                          \
         "Checkpoints of the model that the coordinator has saved.")                               \
  METRIC(kCheckpointFailures, Counter, "emberd_checkpoint_failures_total", "model", "1",           \
         "Checkpoints of the model that could not be saved.")                                      \
  METRIC(kCheckpointBytes, Counter, "emberd_checkpoint_bytes_total", "model", "bytes",             \
         "Bytes of the checkpoints that the coordinator has saved.")                               \
  METRIC(kCheckpointStoredBytes, Gauge, "emberd_checkpoint_stored_bytes", "model", "bytes",        \
         "Bytes of all checkpoints of the model on the disk, when the coordinator last saved or "  \
         "deleted one.")                                                                           \
  METRIC(                                                                                          \
      kCheckpointSeconds, Gauge, "emberd_checkpoint_last_timestamp_seconds", "model", "seconds",   \
      "When the coordinator's newest checkpoint of the model was saved, in seconds since 1970.")   \
  METRIC(kCheckpointPauseSeconds, Gauge, "emberd_checkpoint_last_pause_seconds", "model",          \
         "seconds", "How long updates were paused for the newest checkpoint.")                     \
  METRIC(kTableBytes, Gauge, "emberd_table_bytes", "server", "bytes",                              \
         "Bytes reserved for weights and optimizer slots.")                                        \
  METRIC(kTableBudgetBytes, Gauge, "emberd_table_budget_bytes", "server", "bytes",                 \
         "Bytes that weights and optimizer slots may take.")                                       \
  METRIC(kTableResidentBytes, Gauge, "emberd_table_resident_bytes", "server", "bytes",             \
         "Of the bytes reserved, those of models that are not evicted (ClusterConfig.eviction).")  \
  METRIC(kTablePinnedBytes, Gauge, "emberd_table_pinned_bytes", "server", "bytes",                 \
         "Of the bytes reserved, those of models that are pinned, and never evicted.")             \
  METRIC(kTableHostBytes, Gauge, "emberd_table_host_bytes", "server", "bytes",                     \
         "Bytes of evicted models that are kept in memory.")                                       \
  METRIC(kTableSpilledBytes, Gauge, "emberd_table_spilled_bytes", "server", "bytes",               \
         "Bytes of evicted rows on disk.")                                                         \
  METRIC(kEvictions, Counter, "emberd_evictions_total", "server", "1",                             \
         "Times that a model was evicted to make room for another.")                               \
  METRIC(kReturns, Counter, "emberd_evicted_returns_total", "server", "1",                         \
         "Times that an evicted model came back because it was used.")                             \
  METRIC(kMemoryFailures, Counter, "emberd_memory_failures_total", "server", "1",                  \
         "Times that a model could not be given its memory.")                                      \
  METRIC(kLogBytes, Gauge, "emberd_log_bytes", "server", "bytes",                                  \
         "Bytes of the shard's log (storage.durability LOG).")                                     \
  METRIC(kLogRefuses, Gauge, "emberd_log_refuses", "server", "1",                                  \
         "1 while the shard refuses changes because its log cannot be written or read, else 0.")   \
  METRIC(kRecovering, Gauge, "emberd_recovering", "server", "1",                                   \
         "1 while the shard reads its checkpoints and its log after a start, else 0.")             \
  METRIC(kBatches, Gauge, "emberd_batches", "server", "1",                                         \
         "Batches kept between Lookup and ApplyGradients.")                                        \
  METRIC(kBatchBytes, Gauge, "emberd_batch_bytes", "server", "bytes",                              \
         "Bytes of the batches kept between Lookup and ApplyGradients.")                           \
  METRIC(kBatchBudgetBytes, Gauge, "emberd_batch_budget_bytes", "server", "bytes",                 \
         "Bytes that kept batches may take.")                                                      \
  METRIC(kMaxBatches, Gauge, "emberd_max_batches", "server", "1",                                  \
         "Batches that may be kept at once.")                                                      \
  METRIC(kBatchesExpired, Counter, "emberd_batches_expired_total", "server", "1",                  \
         "Batches dropped because they were neither applied nor released in time.")                \
  METRIC(kReplays, Counter, "emberd_replays_total", "server", "1",                                 \
         "Retries of a finished mutation that were answered from the record.")                     \
  METRIC(kLaneCalls, Counter, "emberd_lane_calls_total", "server", "1",                            \
         "Of the requests, small ones of this machine that did not come by gRPC.")                 \
  METRIC(kPrograms, Gauge, "emberd_programs", "server", "1", "Compiled programs that are kept.")   \
  METRIC(kProgramCompilations, Counter, "emberd_program_compilations_total", "server", "1",        \
         "Programs that were compiled; those that were found compiled are not counted.")           \
  METRIC(kProgramHandles, Gauge, "emberd_program_handles", "server", "1",                          \
         "Handles that clients have of programs, batches and results.")                            \
  METRIC(kProgramHandlesExpired, Counter, "emberd_program_handles_expired_total", "server", "1",   \
         "Handles released because their client made no call in time.")                            \
  GROUP("Batches",                                                                                 \
        "Of the lookups of one coordinator. Beyond 256 pairs, model and stack are `other`.")       \
  METRIC(kBatchMinibatches, Histogram, "emberd_batch_minibatches", "model", "1",                   \
         "Mini-batches of a batch.")                                                               \
  METRIC(kExamples, Counter, "emberd_examples_total", "model", "1",                                \
         "Examples looked up: of each batch, the samples of the feature with the most samples.")   \
  METRIC(kMissingGradients, Counter, "emberd_missing_gradients_total", "model", "1",               \
         "Features of updates that came without a gradient, which counts as zero.")                \
  METRIC(kBatchIds, Histogram, "emberd_batch_ids", "model, stack", "1",                            \
         "Distinct (sample, id) pairs of a batch.")                                                \
  METRIC(kBatchUniqueIds, Histogram, "emberd_batch_unique_ids", "model, stack", "1",               \
         "Distinct ids of a batch, as counted for the limits.")                                    \
  METRIC(kBatchDuplicateIds, Histogram, "emberd_batch_duplicate_ids", "model, stack", "1",         \
         "Ids of a batch that were merged into an equal one of their sample.")                     \
  METRIC(kBatchMaxIds, Histogram, "emberd_batch_max_ids_per_partition", "model, stack", "1",       \
         "Most distinct (sample, id) pairs that a source slot of a batch sent to one partition.")  \
  METRIC(kBatchMaxUniqueIds, Histogram, "emberd_batch_max_unique_ids_per_partition",               \
         "model, stack", "1",                                                                      \
         "Most distinct ids that a source slot of a batch sent to one partition.")                 \
  METRIC(kBatchBufferCells, Histogram, "emberd_batch_required_buffer_size", "model, stack", "1",   \
         "Entries of the CSR buffers of a batch, padding included.")                               \
  METRIC(kDroppedIds, Counter, "emberd_dropped_ids_total", "model, stack", "1",                    \
         "Ids dropped where the configuration allows it.")                                         \
  METRIC(kBatchImbalance, Histogram, "emberd_batch_imbalance_ratio", "model, stack", "ratio",      \
         "Ids of a batch in its fullest partition, divided by the mean over the partitions; 1 is " \
         "even.")                                                                                  \
  METRIC(kBatchesRefused, Counter, "emberd_batches_refused_total", "model", "1",                   \
         "Batches refused because no cut keeps them within the limits, or for their capacity.")    \
  METRIC(kStackMaxIds, Gauge, "emberd_stack_max_ids_per_partition", "model, stack", "1",           \
         "Limit on emberd_batch_max_ids_per_partition; 0: none.")                                  \
  METRIC(kStackMaxUniqueIds, Gauge, "emberd_stack_max_unique_ids_per_partition", "model, stack",   \
         "1", "Limit on emberd_batch_max_unique_ids_per_partition; 0: none.")                      \
  GROUP("Training groups",                                                                         \
        "Of the ranks that one coordinator serves. Beyond 64 pairs, model and group are `other`; " \
        "so is a rank from 64 on.")                                                                \
  METRIC(kGroupSteps, Counter, "emberd_group_steps_total", "model, group", "1",                    \
         "Updates sent by ranks of a training group.")                                             \
  METRIC(kGroupStageSeconds, Histogram, "emberd_group_stage_duration_seconds",                     \
         "model, group, stage", "seconds",                                                         \
         "Time of a rank's lookup or update in one stage: preprocess, wait_for_ranks, "            \
         "wait_for_update, gather, combine, apply.")                                               \
  METRIC(kGroupLastArrivals, Counter, "emberd_group_last_arrivals_total", "model, group, rank",    \
         "1", "Exchanges among the ranks of a group in which this rank came last.")                \
  METRIC(kGroupDroppedIds, Counter, "emberd_group_dropped_ids_total", "model, group, rank", "1",   \
         "Ids of a rank dropped where the configuration allows it.")                               \
  METRIC(kGroupFailures, Counter, "emberd_group_failures_total", "model, group, code", "1",        \
         "Streams of a training group that ended with an error, by status code.")                  \
  GROUP("Shards",                                                                                  \
        "Beyond 256 pairs, model and stack are `other`; tables beyond 256 are not shown.")         \
  METRIC(kRowsGathered, Counter, "emberd_rows_gathered_total", "shard, model, stack", "1",         \
         "Rows read for lookups, one for each entry of a batch.")                                  \
  METRIC(kRowsUpdated, Counter, "emberd_rows_updated_total", "shard, model, stack", "1",           \
         "Rows written by optimizers.")                                                            \
  METRIC(kRowsSkipped, Counter, "emberd_rows_skipped_total", "shard, model, stack", "1",           \
         "Rows left as they were because their summed gradient was not finite.")                   \
  METRIC(kPartitionRowsGathered, Counter, "emberd_partition_rows_gathered_total",                  \
         "shard, partition", "1",                                                                  \
         "Rows read for lookups in one partition; partitions are counted over the whole cluster.") \
  METRIC(kPartitionRowsUpdated, Counter, "emberd_partition_rows_updated_total",                    \
         "shard, partition", "1", "Rows written by optimizers in one partition.")                  \
  METRIC(kHotRowsShare, Gauge, "emberd_hot_rows_share", "shard, model, table, top", "1",           \
         "Share of a table's lookups on this shard, since its start, that go at least to its 1, "  \
         "10 or 100 hottest rows; from one lookup in 1,024, so too high after few lookups.")       \
  METRIC(kShardSentBytes, Counter, "emberd_shard_sent_bytes_total", "shard, model, stack, mode",   \
         "bytes", "Bytes of looked-up rows that a shard sent, as partial_sums or as unique_rows.") \
  METRIC(kShardReceivedBytes, Counter, "emberd_shard_received_bytes_total", "shard, model, stack", \
         "bytes", "Bytes of gradients that a shard received, as float32.")                         \
  GROUP("Calls to shards", "As a coordinator sees them.")                                          \
  METRIC(kShardReachable, Gauge, "emberd_shard_reachable", "shard", "1",                           \
         "1 if the coordinator's last call reached the shard, else 0.")                            \
  METRIC(kShardCalls, Counter, "emberd_shard_calls_total", "shard, method, code", "1",             \
         "Calls to a shard, by status code.")                                                      \
  METRIC(kShardCallSeconds, Histogram, "emberd_shard_call_duration_seconds", "shard, method",      \
         "seconds", "Time that a call to a shard took, as its coordinator saw it.")                \
  GROUP("Processes", "Under the names that other exporters use too.")                              \
  METRIC(kBuildInfo, Gauge, "emberd_build_info", "version, role", "1",                             \
         "Always 1; the labels say what runs here.")                                               \
  METRIC(kProcessStartSeconds, Gauge, "process_start_time_seconds", "", "seconds",                 \
         "Start of the process, in seconds since 1970.")                                           \
  METRIC(kProcessCpuSeconds, Counter, "process_cpu_seconds_total", "", "seconds",                  \
         "User and system CPU time.")                                                              \
  METRIC(kProcessResidentBytes, Gauge, "process_resident_memory_bytes", "", "bytes",               \
         "Memory that the process has in RAM.")                                                    \
  METRIC(kProcessHugePageBytes, Gauge, "process_huge_page_bytes", "", "bytes",                     \
         "The part of the memory in RAM that is in huge pages.")                                   \
  METRIC(kProcessOpenFds, Gauge, "process_open_fds", "", "1", "Open file descriptors.")

enum class MetricId {
#define EMBERD_GROUP(title, about)
#define EMBERD_METRIC(id, ...) id,
  EMBERD_METRICS(EMBERD_GROUP, EMBERD_METRIC)
#undef EMBERD_METRIC
#undef EMBERD_GROUP
};

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricInfo {
  MetricId id;
  std::string_view name;
  MetricType type;
  std::string_view labels;  // their names, separated by ", "
  std::string_view unit;
  std::string_view help;

  std::vector<std::string> LabelNames() const;
};

absl::Span<const MetricInfo> MetricCatalogue();
const MetricInfo& Describe(MetricId id);

// Upper bounds of a histogram's buckets, by unit: seconds 50 us to 50 s, ratios 1 to 1024, counts 1
// to 4^12.
const std::vector<double>& BucketBounds(const MetricInfo& metric);

// The catalogue in Markdown, group by group: what `emberd metrics` prints, and deploy/METRICS.md.
std::string MetricReference();

}  // namespace emberd::ops
