// Models that serve checkpoints: one follows the other under one name while lookups go on.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/config.h"
#include "server/coordinator/model_registry.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

// So long shards keep rows that others have followed: coordinators hear of these within a second or
// two, and calls that began on the old rows end on them.
constexpr absl::Duration kFollowedPatience = absl::Seconds(5);
constexpr absl::Duration kUnserveDeadline = absl::Seconds(2);

}  // namespace

absl::Status ModelRegistry::CheckServable(const ServedModel& model, const ShardModels& shards,
                                          rpc::CallContext* context) {
  const std::string& name = model.config.name();
  for (int shard = 0; shard < static_cast<int>(shards.size()); ++shard) {
    for (const internal::v1::HostedModel& here : shards.AllOnShard(shard, name)) {
      if (here.serves().model().empty()) {
        return absl::AlreadyExistsError(
            absl::StrCat("model '", name,
                         "' is declared on this cluster and serves no checkpoint; serve the "
                         "checkpoint under another name (serve_as, `emberctl serve --as`)"));
      }
    }
  }
  RETURN_IF_ERROR(CheckName(model.config, model.id, shards, context));
  for (const internal::v1::HostedModel& here : shards.HistoriesOf(model.id)) {
    // It goes by itself if nobody goes on with it. Another coordinator may have served it on some
    // shards and be about to do so on the others.
    if (!here.serving()) return BeingRestored(model.config);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ModelRegistry::MakeRoomBeside(ServedModel* model,
                                                       rpc::CallContext* context) {
  ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  RETURN_IF_ERROR(CheckServable(*model, shards, context));
  const ModelVerdict verdict = Judge(model->id, /*known=*/0, &shards, context);
  const bool whole = verdict.state == ModelState::kServing;
  const std::vector<internal::v1::HostedModel> here = shards.HistoriesOf(model->id);
  if (here.empty()) return 0;
  // Of rows that some shards have lost, what is left shows that there is a model.
  const uint64_t stays = whole ? verdict.history : here.back().history();
  for (const internal::v1::HostedModel& rows : here) {
    model->serves.set_version(std::max(model->serves.version(), rows.serves().version() + 1));
    if (rows.history() == stays) continue;
    RETURN_IF_ERROR(changes_.DropHistory(model->id, rows.history(), whole, context));
  }
  return whole ? 0 : stays;
}

absl::Status ModelRegistry::MakeServed(const ServedModel& model, const RowSource& source,
                                       rpc::CallContext* context) {
  const ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  model.SetLimits(shards.LimitsOf(model.id, 0));
  absl::Status made = changes_.Make(model, model.history, shards, &source, context);
  if (made.ok()) return made;
  changes_.Undo(model.id, model.history);
  // Where some shards serve it already, all go on with the rows of before.
  rpc::CallContext undoing(SteadyNow() + kUnserveDeadline);
  changes_.DropHistory(model.id, model.history, /*unless_only=*/true, &undoing).IgnoreError();
  return made;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRegistry::Serve(v1::ModelConfig config,
                                                                        const RowSource& source,
                                                                        rpc::CallContext* context) {
  RETURN_IF_ERROR(config::CompleteModel(&config));
  ASSIGN_OR_RETURN(std::shared_ptr<ServedModel> model, MakeModel(config, NewHistory()));
  const v1::CheckpointManifest& manifest = source.chain.front().manifest();
  model->serves.set_model(manifest.model());
  model->serves.set_checkpoint(manifest.name());
  model->serves.set_checkpoint_id(manifest.checkpoint_id());
  model->serves.set_version(1);
  absl::MutexLock lock(&serving_);
  ASSIGN_OR_RETURN(const uint64_t useless, MakeRoomBeside(model.get(), context));
  absl::Status made = MakeServed(*model, source, context);
  if (absl::IsResourceExhausted(made) && useless != 0) {
    RETURN_IF_ERROR(changes_.DropHistory(model->id, useless, /*unless_only=*/false, context));
    model->history = NewHistory();
    made = MakeServed(*model, source, context);
  }
  RETURN_IF_ERROR(made);
  Remember(model);
  ops::Log(ops::LogLevel::kInfo, "model serves a checkpoint",
           {{"model", config.name()},
            {"model_id", absl::StrCat(absl::Hex(model->id, absl::kZeroPad16))},
            {"checkpoint", ServesText(model->serves)}});
  return model;
}

void ModelRegistry::DropFollowed(const ServedModel& model, const ShardModels& shards,
                                 rpc::CallContext* context) {
  std::vector<uint64_t> followed;
  for (const internal::v1::HostedModel& here : shards.HistoriesOf(model.id)) {
    if (here.serves().version() < model.serves.version()) followed.push_back(here.history());
  }
  {
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(model.id);
    if (found == models_.end() || found->second.model->history != model.history) return;
    absl::Time& since = found->second.followed;
    since = followed.empty() ? absl::InfiniteFuture() : std::min(since, SteadyNow());
    if (SteadyNow() < since + kFollowedPatience) return;
  }
  for (const uint64_t history : followed) {
    changes_.DropHistory(model.id, history, /*unless_only=*/true, context).IgnoreError();
  }
}

}  // namespace emberd::server
