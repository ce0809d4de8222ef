#include "server/ops/rpc_names.h"

#include <iterator>

namespace emberd::ops {
namespace {

constexpr std::string_view kRpcNames[] = {
    "EmbeddingService/DeclareModel",
    "EmbeddingService/DescribeModel",
    "EmbeddingService/Lookup",
    "EmbeddingService/ApplyGradients",
    "EmbeddingService/Train",
    "EmbeddingService/ReleaseBatch",
    "EmbeddingService/ReadRows",
    "EmbeddingService/AssignRows",
    "EmbeddingService/ExportTable",
    "EmbeddingService/ShareMemory",
    "AdminService/GetStatus",
    "AdminService/GetLimits",
    "AdminService/SetLimits",
    "AdminService/GetMetrics",
    "AdminService/GetStats",
    "AdminService/Drain",
    "AdminService/DropModel",
    "AdminService/ResetModel",
    "AdminService/DropGroup",
    "AdminService/ChangeMemory",
    "CheckpointService/SaveCheckpoint",
    "CheckpointService/RestoreCheckpoint",
    "CheckpointService/ServeCheckpoint",
    "CheckpointService/VerifyCheckpoint",
    "CheckpointService/MergeCheckpoint",
    "CheckpointService/DiffCheckpoints",
    "CheckpointService/ListCheckpoints",
    "CheckpointService/GetCheckpoint",
    "CheckpointService/DeleteCheckpoint",
    "CheckpointService/ExportCheckpoint",
    "ProgramService/Compile",
    "ProgramService/Release",
    "ProgramService/PrepareBatch",
    "ProgramService/Execute",
    "ProgramService/ExecuteChained",
    "ProgramService/ReadHandle",
    "ShardService/CreateModel",
    "ShardService/ServeModel",
    "ShardService/FindModel",
    "ShardService/ListModels",
    "ShardService/DropModel",
    "ShardService/Gather",
    "ShardService/Apply",
    "ShardService/OpenGroup",
    "ShardService/DecideStep",
    "ShardService/DropGroups",
    "ShardService/ReleaseBatch",
    "ShardService/ReadRows",
    "ShardService/AssignRows",
    "ShardService/FindMutation",
    "ShardService/DecideMutation",
    "ShardService/GetStatus",
    "ShardService/ShareMemory",
    "ShardService/ChangeMemory",
    "ShardService/PauseChanges",
    "ShardService/ResumeChanges",
    "ShardService/BeginSave",
    "ShardService/BeginRestore",
    "ShardService/GetTransfer",
    "ShardService/CancelTransfer",
    "ShardService/CompleteSave",
    "CollectiveService/Join",
    "CollectiveService/AllGather",
    "CollectiveService/Advance",
    "CollectiveService/Leave",
};
static_assert(std::size(kRpcNames) == kRpcCount);

constexpr std::string_view kStageNames[] = {"decode",  "preprocess",     "gather_wait",
                                            "combine", "encode",         "stage",
                                            "commit",  "wait_for_ranks", "wait_for_update"};
static_assert(std::size(kStageNames) == kStageCount);

constexpr std::string_view kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
static_assert(std::size(kCodeNames) == kCodeCount);

}  // namespace

std::string_view RpcName(Rpc rpc) { return kRpcNames[static_cast<size_t>(rpc)]; }
std::string_view StageName(Stage stage) { return kStageNames[static_cast<size_t>(stage)]; }

std::string_view CodeName(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kCodeCount ? kCodeNames[index] : "UNKNOWN";
}

}  // namespace emberd::ops
