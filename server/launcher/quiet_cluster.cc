#include "server/launcher/quiet_cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "server/coordinator/checkpoints.h"
#include "server/rpc/call_context.h"

namespace emberd::launcher {
namespace {

std::string MovedName(absl::Time time) {
  return absl::StrCat("moved-", absl::FormatTime("%Y%m%d-%H%M%E3S", time, absl::UTCTimeZone()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<QuietCluster>> QuietCluster::Start(v1::ClusterConfig cluster,
                                                                  int shards) {
  const int partitions = cluster.shards_size() * cluster.sparsecores_per_shard();
  const v1::ShardConfig shard = cluster.shards(0);
  cluster.clear_shards();
  for (int i = 0; i < shards; ++i) *cluster.add_shards() = shard;
  cluster.set_sparsecores_per_shard(partitions / shards);
  std::unique_ptr<QuietCluster> started(
      new QuietCluster(std::max(cluster.coordinator_threads(), shards * cluster.shard_threads())));
  for (int i = 0; i < shards; ++i) {
    ASSIGN_OR_RETURN(started->shards_.emplace_back(),
                     server::MakeLocalShard(cluster, i, &started->metrics_, &started->threads_));
  }
  // So that no checkpoint comes or goes by itself.
  cluster.mutable_storage()->set_durability(v1::StorageConfig::MEMORY);
  started->coordinator_ = std::make_unique<server::Coordinator>(
      cluster, /*index=*/0, started->shards_, &started->metrics_, &started->threads_);
  return started;
}

absl::StatusOr<std::vector<SavedModel>> QuietCluster::SaveAll(
    const std::function<bool()>& stopped) {
  rpc::CallContext context(absl::InfiniteFuture());
  ASSIGN_OR_RETURN(const internal::v1::ListModelsResponse list,
                   shards_[0]->ListModels({}, &context));
  std::vector<SavedModel> saved;
  for (const internal::v1::HostedModel& model : list.models()) {
    if (!model.serving() || model.has_serves()) continue;
    ASSIGN_OR_RETURN(saved.emplace_back(), Save(model.name(), stopped));
  }
  return saved;
}

absl::StatusOr<SavedModel> QuietCluster::Save(const std::string& model,
                                              const std::function<bool()>& stopped) {
  rpc::CallContext context(absl::InfiniteFuture());
  const server::CoordinatorResources& resources = coordinator_->resources();
  server::Checkpoints& checkpoints = *resources.checkpoints;
  ASSIGN_OR_RETURN(const auto found, resources.registry->FindByName(model, &context));
  const server::SaveOptions options = {.name = MovedName(absl::Now()),  // a date
                                       .incremental = true,
                                       .automatic = true};
  ASSIGN_OR_RETURN(const auto save,
                   checkpoints.BeginSave(found, options, checkpoints.MakePause(found), &context));
  const auto report = [&](int64_t, int64_t) {
    return stopped() ? absl::CancelledError("stopped while a model was being saved")
                     : absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const v1::CheckpointInfo info,
                   checkpoints.FinishSave(save.get(), report, &context));
  return SavedModel{model, info.name()};
}

absl::Status QuietCluster::RestoreAll(const std::vector<SavedModel>& models,
                                      const std::function<bool()>& stopped) {
  for (const SavedModel& saved : models) RETURN_IF_ERROR(Restore(saved, stopped));
  return absl::OkStatus();
}

absl::Status QuietCluster::Restore(const SavedModel& saved, const std::function<bool()>& stopped) {
  rpc::CallContext context(absl::InfiniteFuture());
  server::Checkpoints& checkpoints = *coordinator_->resources().checkpoints;
  v1::RestoreCheckpointRequest request;
  request.set_model(saved.model);
  request.set_name(saved.checkpoint);
  const auto report = [&](const v1::CheckpointProgress&) {
    return stopped() ? absl::CancelledError("stopped while a model was being restored")
                     : absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const v1::CheckpointProgress done,
                   checkpoints.Restore(request, report, &context));
  ASSIGN_OR_RETURN(const v1::CheckpointManifest manifest,
                   checkpoints.store().Read(saved.model, saved.checkpoint));
  // This coordinator does not know that there are logs.
  return checkpoints.store().SetBeginning(manifest, done.history());
}

}  // namespace emberd::launcher
