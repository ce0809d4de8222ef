#include "server/launcher/shard_count.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include <google/protobuf/text_format.h>
#include <unistd.h>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/thread_pools.h"
#include "config/shared_tables.h"
#include "emberd/internal/v1/log.pb.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/shard_models.h"
#include "server/files/files.h"
#include "server/host/shard_backend.h"
#include "server/log/inspect.h"
#include "server/log/log_files.h"
#include "server/log/log_reader.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"

namespace emberd::launcher {
namespace {

using files::IsThere;
using files::PathIn;
using internal::v1::ShardMove;
using ops::Log;
using ops::LogLevel;

constexpr char kShard[] = "shard-";
constexpr char kOldShards[] = "old-shards";

std::string Text(int shards, int partitions) {
  return absl::StrCat(shards, shards == 1 ? " shard with " : " shards with ", partitions / shards,
                      " SparseCores each");
}

absl::Status CheckNotStopped(const std::function<bool()>& stopped) {
  return stopped() ? absl::CancelledError("stopped while models were being moved")
                   : absl::OkStatus();
}

// Whether no shard serves rows of it, nor has rows from a checkpoint: it is being declared, or
// reset. Who declares it again loses no row that was not given up.
bool IsBeingDeclared(const coordinator::ShardModels& models, uint64_t model_id) {
  return models.Judge(model_id, /*known=*/0).history == 0 &&
         absl::c_none_of(models.HistoriesOf(model_id),
                         [](const auto& history) { return history.restored(); });
}

// The shards of a storage.directory in this process, where nobody can call them: to save and to
// restore their models. Not thread-safe. It saves nothing by itself. Shards have the disk write
// what they log before the destructor returns (not with fsync NEVER).
class QuietCluster {
 public:
  // The shards of `cluster`, but so many, with as many partitions in all. Waits until they have
  // read their logs; `stopped`, when it says so, ends that with CANCELLED.
  static absl::StatusOr<std::unique_ptr<QuietCluster>> Start(v1::ClusterConfig cluster, int shards,
                                                             const std::function<bool()>& stopped) {
    const int partitions = cluster.shards_size() * cluster.sparsecores_per_shard();
    const v1::ShardConfig shard = cluster.shards(0);
    cluster.clear_shards();
    for (int i = 0; i < shards; ++i) *cluster.add_shards() = shard;
    cluster.set_sparsecores_per_shard(partitions / shards);
    std::unique_ptr<QuietCluster> started(new QuietCluster(
        std::max(cluster.coordinator_threads(), shards * cluster.shard_threads())));
    for (int i = 0; i < shards; ++i) {
      ASSIGN_OR_RETURN(
          started->shards_.emplace_back(),
          host::MakeLocalShard(cluster, i, &started->metrics_, &started->threads_, stopped));
    }
    const v1::StorageConfig storage = cluster.storage();
    // So that no checkpoint comes or goes by itself.
    cluster.mutable_storage()->set_durability(v1::StorageConfig::MEMORY);
    started->coordinator_ = std::make_unique<coordinator::Coordinator>(
        cluster, /*index=*/0, started->shards_, &started->metrics_, &started->threads_);
    // These know that there are logs, and keep the checkpoints that logs begin with.
    const coordinator::CoordinatorResources& resources = started->coordinator_->resources();
    started->checkpoints_.emplace(storage, *resources.shards, resources.mutations,
                                  resources.registry, &started->threads_.blocking);
    return started;
  }

  // Adds a checkpoint of each model that is trained to `move`; saves none unless all can be moved.
  // DATA_LOSS, UNAVAILABLE: a model is lost, or was being reset, restored or dropped. `stopped`,
  // when it says so, ends it with CANCELLED.
  absl::Status SaveAll(const std::function<bool()>& stopped, ShardMove* move) {
    rpc::CallContext context(absl::InfiniteFuture());
    const coordinator::CoordinatorResources& resources = coordinator_->resources();
    const auto there = coordinator::ShardModels::Ask(*resources.shards, &context);
    RETURN_IF_ERROR(there.complete());
    std::vector<step::ServedModelPtr> models;
    for (const auto& [shard, hosted] : there.EveryTrained()) {
      if (IsBeingDeclared(there, hosted.model_id())) {
        Log(LogLevel::kWarning,
            "a model whose declaration or reset had not ended is not moved; declare it again",
            {{"model", hosted.name()}});
        continue;
      }
      const auto model = resources.registry->Find(hosted.model_id(), &context);
      RETURN_IF_ERROR(Annotate(model.status(), absl::StrCat("model '", hosted.name(), "'")));
      for (const step::ServedModelPtr& other : models) {
        RETURN_IF_ERROR(CheckShareNothing(other->config, (*model)->config));
      }
      models.push_back(*model);
    }
    for (const step::ServedModelPtr& model : models) {
      ShardMove::Model* const moved = move->add_models();
      moved->set_name(model->config.name());
      *moved->mutable_limits() = there.LimitsOf(model->id, model->history);
      moved->set_pinned(there.Merged(model->id).pinned());
      ASSIGN_OR_RETURN(*moved->mutable_checkpoint(), Save(model, stopped));
    }
    return absl::OkStatus();
  }

  absl::Status Restore(const ShardMove::Model& moved, const std::function<bool()>& stopped) {
    rpc::CallContext context(absl::InfiniteFuture());
    v1::RestoreCheckpointRequest request;
    request.set_model(moved.name());
    request.set_name(moved.checkpoint());
    const auto report = [&](const v1::CheckpointProgress&) { return CheckNotStopped(stopped); };
    RETURN_IF_ERROR(checkpoints_->Restore(request, report, &context).status());
    return KeepSettings(moved, &context);
  }

 private:
  explicit QuietCluster(int threads) : metrics_("up"), threads_(threads) {}

  // What operators set while the model was served, which no checkpoint holds.
  absl::Status KeepSettings(const ShardMove::Model& before, rpc::CallContext* context) {
    if (before.limits().version() > 0) {
      v1::SetLimitsRequest request;
      request.set_model(before.name());
      *request.mutable_limits() = before.limits().stacks();
      const absl::Status set =
          coordinator_->resources().registry->SetLimits(request, context).status();
      if (absl::IsInvalidArgument(set)) {  // of other shards
        Log(LogLevel::kWarning, "a model has the limits again that it was declared with",
            {{"model", before.name()}, {"reason", std::string(set.message())}});
      } else {
        RETURN_IF_ERROR(set);
      }
    }
    if (!before.pinned()) return absl::OkStatus();
    v1::ChangeMemoryRequest pin;
    pin.set_operation(v1::ChangeMemoryRequest::PIN);
    pin.set_model(before.name());
    const absl::Status pinned = coordinator_->ChangeMemory(pin, context).status();
    // Without `eviction`, nothing leaves memory.
    if (pinned.ok() || absl::IsFailedPrecondition(pinned)) return absl::OkStatus();
    Log(LogLevel::kWarning, "a model that was pinned is not pinned any more",
        {{"model", before.name()}, {"reason", std::string(pinned.message())}});
    return absl::OkStatus();
  }

  // A restored model has new rows, which no other one may have in common with it.
  static absl::Status CheckShareNothing(const v1::ModelConfig& a, const v1::ModelConfig& b) {
    const std::string resource = config::CommonResource(a, b);
    if (resource.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "models '", a.name(), "' and '", b.name(), "' share the tables of resource '", resource,
        "', and cannot be moved to another number of shards; keep the number, or drop one of them "
        "(`emberctl model drop`)"));
  }

  // Its name.
  absl::StatusOr<std::string> Save(const step::ServedModelPtr& model,
                                   const std::function<bool()>& stopped) {
    rpc::CallContext context(absl::InfiniteFuture());
    ASSIGN_OR_RETURN(
        const auto save,
        checkpoints_->BeginSave(
            model, {.name = coordinator::AutomaticName(), .incremental = true, .automatic = true},
            checkpoints_->MakePause(model), &context));
    const auto report = [&](int64_t, int64_t) { return CheckNotStopped(stopped); };
    ASSIGN_OR_RETURN(const v1::CheckpointInfo info,
                     checkpoints_->FinishSave(save.get(), report, &context));
    return info.name();
  }

  ops::Metrics metrics_;
  ThreadPools threads_;
  std::vector<std::shared_ptr<host::ShardBackend>> shards_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  std::optional<coordinator::Checkpoints> checkpoints_;
};

std::string ChecksumLine(absl::string_view text) {
  return absl::StrCat("# crc32c ", absl::Hex(ExtendCrc32c(0, text)));
}

// The file `moving`: a line with the checksum of the others, and these.
std::string Encode(const ShardMove& move) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(move, &text);
  return absl::StrCat(ChecksumLine(text), "\n", text);
}

std::optional<ShardMove> Decode(const std::string& file) {
  const std::pair<absl::string_view, std::string> parts =
      absl::StrSplit(file, absl::MaxSplits('\n', 1));
  ShardMove move;
  const bool whole = parts.first == ChecksumLine(parts.second) &&
                     google::protobuf::TextFormat::ParseFromString(parts.second, &move);
  return whole ? std::make_optional(std::move(move)) : std::nullopt;
}

// Of how many shards the log is; 0: it had hardly begun.
absl::StatusOr<int> ShardsOf(const std::string& log) {
  ASSIGN_OR_RETURN(const log::LogFolder found, log::ListLog(log));
  for (auto segment = found.records.rbegin(); segment != found.records.rend(); ++segment) {
    ASSIGN_OR_RETURN(
        const std::string bytes,
        files::ReadFileBegin(PathIn(log, log::RecordsName(*segment)), log::kLogHeadBytes));
    ASSIGN_OR_RETURN(const std::optional<log::LogHead> head, log::DecodeLogHead(bytes));
    if (head.has_value()) return static_cast<int>(head->shards);
  }
  return 0;
}

// The same of a whole storage.directory; 0: there are no logs.
absl::StatusOr<int> ShardsOfLogs(const std::string& folder) {
  const auto logs = log::FindLogs(folder);
  if (absl::IsNotFound(logs.status())) return 0;
  RETURN_IF_ERROR(logs.status());
  int shards = 0;
  std::string first;
  for (const std::string& log : *logs) {
    ASSIGN_OR_RETURN(const int here, ShardsOf(log));
    if (shards == 0) first = log;
    if (shards != 0 && here != 0 && here != shards) {
      return absl::FailedPreconditionError(
          absl::StrCat(first, " is the log of one of ", shards, " shards, but ", log, " of one of ",
                       here, "; move the shard-* folders away that do not belong to this cluster"));
    }
    shards = std::max(shards, here);
  }
  return shards;
}

// How many each of the shards had; nothing: no model tells.
absl::StatusOr<std::optional<int>> SparseCoresOf(const std::string& log) {
  std::optional<int> sparsecores;
  const auto learn = [&](const internal::v1::LogRecord& record, const log::LogPosition&) {
    if (record.has_model_made()) {
      sparsecores = record.model_made().create().sparsecores_per_shard();
    }
    for (const internal::v1::LogModel& model : record.state().models()) {
      sparsecores = model.create().sparsecores_per_shard();
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(log::ReadLog(log, learn).status());
  return sparsecores;
}

// On the disk, and intact.
absl::Status CheckLog(const std::string& log) {
  ASSIGN_OR_RETURN(const log::LogFolder found, log::ListLog(log));
  for (const auto& [segment, name] : found.files()) {
    RETURN_IF_ERROR(log::SystemLogFiles().Sync(PathIn(log, name)));
  }
  return log::VerifyLog(log).status();
}

class LogMove {
 public:
  LogMove(const v1::ClusterConfig& cluster, const std::function<bool()>& stopped)
      : cluster_(cluster),
        stopped_(stopped),
        folder_(cluster.storage().directory()),
        shards_(cluster.shards_size()),
        partitions_(shards_ * cluster.sparsecores_per_shard()) {}

  // Whether there is anything to do.
  absl::StatusOr<bool> Needed() const {
    ASSIGN_OR_RETURN(const bool moving, IsThere(PathIn(folder_, kMoving)));
    if (moving) return true;
    ASSIGN_OR_RETURN(const int shards, ShardsOfLogs(folder_));
    return shards != 0 && shards != shards_;
  }

  // Of as many shards as there are logs of: FAILED_PRECONDITION if these had other SparseCores.
  // What is wrong with a log itself, its shard says.
  absl::Status CheckSparseCores() const {
    const auto logs = log::FindLogs(folder_);
    if (!logs.ok()) return absl::OkStatus();
    const auto each = SparseCoresOf(logs->front()).value_or(std::nullopt);
    return CheckPartitions(shards_, each.has_value() ? shards_ * *each : partitions_);
  }

  absl::Status Run() {
    ASSIGN_OR_RETURN(std::optional<ShardMove> move, ReadMove());
    if (move.has_value()) {
      RETURN_IF_ERROR(CheckPartitions(move->shards(), move->partitions()));
      Log(LogLevel::kInfo, "an interrupted move to another number of shards goes on",
          {{"folder", folder_}, {"from", move->shards()}, {"to", shards_}});
    } else {
      ASSIGN_OR_RETURN(move, Begin());
    }
    RETURN_IF_ERROR(CheckNotStopped(stopped_));
    RETURN_IF_ERROR(SetLogsAside(*move));
    Log(LogLevel::kInfo, "moved the old logs aside", {{"folder", PathIn(folder_, kOldShards)}});
    RETURN_IF_ERROR(Restore(*move));
    Log(LogLevel::kInfo, "moved all models", {{"shards", shards_}});
    return CheckNotStopped(stopped_);
  }

 private:
  absl::StatusOr<std::optional<ShardMove>> ReadMove() const {
    const absl::StatusOr<std::string> text = files::ReadFileWhole(PathIn(folder_, kMoving));
    if (absl::IsNotFound(text.status())) return std::nullopt;
    RETURN_IF_ERROR(text.status());
    std::optional<ShardMove> move = Decode(*text);
    if (move.has_value()) return move;
    return files::DamagedFile(
        PathIn(folder_, kMoving),
        "is damaged, or of an earlier version of emberd, which can end this move; the old logs are "
        "in old-shards, and in shard-* those that are not there");
  }

  absl::Status CheckPartitions(int shards, int partitions) const {
    if (partitions == partitions_) return absl::OkStatus();
    const int each = partitions / shards_;
    return absl::FailedPreconditionError(absl::StrCat(
        folder_, " holds the logs of ", Text(shards, partitions), " (", partitions,
        " partitions), but ", Text(shards_, partitions_), " have ", partitions_, " partitions; ",
        each > 0 ? absl::StrCat("use --sparsecores ", each, " (sparsecores_per_shard)")
                 : absl::StrCat("use at most ", partitions, " shards"),
        ", or, to change the number of partitions, save checkpoints with the old number, stop, "
        "move the folders shard-NNNN away, and restore the checkpoints"));
  }

  absl::StatusOr<ShardMove> Begin() const {
    ShardMove move;
    ASSIGN_OR_RETURN(const int shards, ShardsOfLogs(folder_));
    move.set_shards(shards);
    ASSIGN_OR_RETURN(const std::vector<std::string> logs, log::FindLogs(folder_));
    ASSIGN_OR_RETURN(const std::optional<int> sparsecores, SparseCoresOf(logs.front()));
    move.set_partitions(sparsecores.has_value() ? shards * *sparsecores : partitions_);
    RETURN_IF_ERROR(CheckPartitions(shards, move.partitions()));
    Log(LogLevel::kInfo, "moving the models to another number of shards",
        {{"folder", folder_}, {"from", shards}, {"to", shards_}});
    RETURN_IF_ERROR(
        Annotate(Save(&move), absl::StrCat("nothing was moved, and ", Text(shards, partitions_),
                                           " can still be started, to mend this")));
    return move;
  }

  // What the shards have that the logs are of; writes the file `moving`.
  absl::Status Save(ShardMove* move) const {
    {
      ASSIGN_OR_RETURN(const auto cluster, QuietCluster::Start(cluster_, move->shards(), stopped_));
      RETURN_IF_ERROR(cluster->SaveAll(stopped_, move));
    }
    ReachFailpoint("move.models_are_saved");
    // Of an earlier move, which has ended: what is to become of them would be unclear.
    RETURN_IF_ERROR(files::RemoveFolder(PathIn(folder_, kOldShards)));
    RETURN_IF_ERROR(files::WriteFileWhole(folder_, kMoving, Encode(*move)));
    ReachFailpoint("move.checkpoints_count");
    return absl::OkStatus();
  }

  absl::Status SetLogsAside(const ShardMove& move) const {
    const std::string old_shards = PathIn(folder_, kOldShards);
    RETURN_IF_ERROR(files::MakeFolders(old_shards));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, files::FoldersIn(folder_));
    for (const std::string& name : names) {
      absl::string_view number = name;
      int shard = 0;
      if (!absl::ConsumePrefix(&number, kShard) || !absl::SimpleAtoi(number, &shard)) continue;
      const std::string from = PathIn(folder_, name);
      const std::string to = PathIn(old_shards, name);
      ASSIGN_OR_RETURN(const bool aside, IsThere(to));
      if (shard >= move.shards() || aside) {
        // Was in the making when an earlier attempt ended.
        RETURN_IF_ERROR(files::RemoveFolder(from));
      } else if (rename(from.c_str(), to.c_str()) != 0) {
        return files::FileError(errno, from, "cannot be moved to " + to);
      }
      ReachFailpoint("move.log_is_aside");
    }
    RETURN_IF_ERROR(files::SyncFolder(old_shards));
    return files::SyncFolder(folder_);
  }

  absl::Status Restore(const ShardMove& move) const {
    {
      ASSIGN_OR_RETURN(const auto cluster, QuietCluster::Start(cluster_, shards_, stopped_));
      for (const ShardMove::Model& moved : move.models()) {
        RETURN_IF_ERROR(cluster->Restore(moved, stopped_));
      }
    }
    ReachFailpoint("move.models_are_restored");
    ASSIGN_OR_RETURN(const std::vector<std::string> logs, log::FindLogs(folder_));
    for (const std::string& log : logs) RETURN_IF_ERROR(CheckLog(log));
    const std::string moving = PathIn(folder_, kMoving);
    if (unlink(moving.c_str()) != 0) return files::FileError(errno, moving, "cannot be removed");
    RETURN_IF_ERROR(files::SyncFolder(folder_));
    ReachFailpoint("move.is_over");
    return absl::OkStatus();
  }

  const v1::ClusterConfig& cluster_;
  const std::function<bool()>& stopped_;
  const std::string folder_;
  const int shards_;  // those that are wanted
  const int partitions_;
};

}  // namespace

absl::Status FitLogsToShards(const v1::ClusterConfig& cluster,
                             const std::function<bool()>& stopped) {
  const v1::StorageConfig& storage = cluster.storage();
  if (storage.durability() != v1::StorageConfig::LOG) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool there, IsThere(storage.directory()));
  if (!there) return absl::OkStatus();
  LogMove move(cluster, stopped);
  ASSIGN_OR_RETURN(bool needed, move.Needed());
  if (!needed) return move.CheckSparseCores();
  // Two of these at once would move each other's logs.
  const auto lock = files::FolderLock::Take(storage.directory());
  if (absl::IsUnavailable(lock.status())) {
    return absl::UnavailableError(
        absl::StrCat("storage.directory ", storage.directory(),
                     ": another `emberd up` moves its models to another number of shards; wait "
                     "until that one is ready, or stop it"));
  }
  RETURN_IF_ERROR(lock.status());
  ASSIGN_OR_RETURN(needed, move.Needed());
  return needed ? move.Run() : absl::OkStatus();
}

bool HasOldLogs(const v1::ClusterConfig& cluster) {
  const std::string& folder = cluster.storage().directory();
  return cluster.storage().durability() == v1::StorageConfig::LOG &&
         IsThere(PathIn(folder, kOldShards)).value_or(false) &&
         !IsThere(PathIn(folder, kMoving)).value_or(true);
}

void RemoveOldLogs(const v1::ClusterConfig& cluster) {
  if (!HasOldLogs(cluster)) return;
  const std::string old_shards = PathIn(cluster.storage().directory(), kOldShards);
  const absl::Status status = files::RemoveFolder(old_shards);
  if (status.ok()) {
    Log(LogLevel::kInfo, "removed the logs of the old shards", {{"folder", old_shards}});
  } else {
    Log(LogLevel::kWarning, "the logs of the old shards could not be removed",
        {{"folder", old_shards}, {"reason", std::string(status.message())}});
  }
}

}  // namespace emberd::launcher
