// Names of the RPCs and of a coordinator's stages, as metrics and logs show them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

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

}  // namespace emberd::ops
