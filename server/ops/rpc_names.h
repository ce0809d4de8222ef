// Names of the RPCs and of a coordinator's stages, as metrics and logs show them.
#pragma once

#include <cstddef>
#include <string_view>

#include "absl/status/status.h"

namespace emberd::ops {

enum class Rpc {
  kDeclareModel,
  kDescribeModel,
  kLookup,
  kApplyGradients,
  kTrain,
  kReleaseBatch,
  kReadRows,
  kAssignRows,
  kExportTable,
  kShareMemory,
  kGetStatus,
  kGetLimits,
  kSetLimits,
  kGetMetrics,
  kGetStats,
  kDrain,
  kDropModel,
  kResetModel,
  kDropGroup,
  kChangeMemory,
  kSaveCheckpoint,
  kRestoreCheckpoint,
  kServeCheckpoint,
  kVerifyCheckpoint,
  kMergeCheckpoint,
  kDiffCheckpoints,
  kListCheckpoints,
  kGetCheckpoint,
  kDeleteCheckpoint,
  kExportCheckpoint,
  kCompile,
  kRelease,
  kPrepareBatch,
  kExecute,
  kExecuteChained,
  kReadHandle,
  kShardGather,
  kShardApply,
  kShardReadRows,
  kShardAssignRows,
  kShardShareMemory,
  kCollectiveJoin,
  kCollectiveAllGather,
  kCollectiveAdvance,
  kCollectiveLeave,
};
// Other numbers are those of a shard's control verbs.
inline constexpr size_t kMaxShardVerbs = 32;
inline constexpr size_t kRpcCount = static_cast<size_t>(Rpc::kCollectiveLeave) + 1 + kMaxShardVerbs;

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

std::string_view RpcName(Rpc rpc);                 // "EmbeddingService/Lookup"; of none: ""
Rpc ShardRpc(std::string_view verb);               // "OpenGroup": of ShardService
std::string_view StageName(Stage stage);           // "gather_wait"
std::string_view CodeName(absl::StatusCode code);  // "UNAVAILABLE"

}  // namespace emberd::ops
