// Every metric that a process may expose: the single list that the code, the reference page and the
// tests share.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace emberd::ops {

// In the order of the catalogue.
enum class MetricId {
  kRpcs,
  kRpcSeconds,
  kRpcRequestBytes,
  kRpcResponseBytes,
  kStageSeconds,
  kInFlightRequests,
  kInFlightBytes,
  kInFlightBudgetBytes,
  kQueuedRequests,
  kTrainStreams,
  kDraining,
  kModels,
  kModelLost,
  kModelRecoveries,
  kCheckpoints,
  kCheckpointFailures,
  kCheckpointBytes,
  kCheckpointStoredBytes,
  kCheckpointSeconds,
  kCheckpointPauseSeconds,
  kTableBytes,
  kTableBudgetBytes,
  kTableResidentBytes,
  kTablePinnedBytes,
  kTableHostBytes,
  kTableSpilledBytes,
  kEvictions,
  kReturns,
  kMemoryFailures,
  kLogBytes,
  kLogRefuses,
  kRecovering,
  kBatches,
  kBatchBytes,
  kBatchBudgetBytes,
  kMaxBatches,
  kBatchesExpired,
  kReplays,
  kLaneCalls,
  kPrograms,
  kProgramCompilations,
  kProgramHandles,
  kProgramHandlesExpired,
  kBatchMinibatches,
  kExamples,
  kMissingGradients,
  kBatchIds,
  kBatchUniqueIds,
  kBatchDuplicateIds,
  kBatchMaxIds,
  kBatchMaxUniqueIds,
  kBatchBufferCells,
  kDroppedIds,
  kBatchImbalance,
  kBatchesRefused,
  kStackMaxIds,
  kStackMaxUniqueIds,
  kGroupSteps,
  kGroupStageSeconds,
  kGroupLastArrivals,
  kGroupFailures,
  kRowsGathered,
  kRowsUpdated,
  kRowsSkipped,
  kPartitionRowsGathered,
  kPartitionRowsUpdated,
  kHotRowsShare,
  kShardSentBytes,
  kShardReceivedBytes,
  kShardReachable,
  kShardCalls,
  kShardCallSeconds,
  kBuildInfo,
  kProcessStartSeconds,
  kProcessCpuSeconds,
  kProcessResidentBytes,
  kProcessHugePageBytes,
  kProcessOpenFds,
};

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricInfo {
  MetricId id;
  std::string_view name;
  MetricType type;
  std::array<std::string_view, 4> labels;  // unused places are empty
  std::string_view unit;  // "seconds", "bytes", "ratio" (to what is ideal), "1" for all else
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
