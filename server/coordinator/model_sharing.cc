// Models that share tables with others.
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/shared_tables.h"
#include "server/coordinator/model_registry.h"

namespace emberd::server {

absl::Status ModelRegistry::CheckShared(const v1::ModelConfig& config, bool changes_rows,
                                        const ShardModels& shards, rpc::CallContext* context) {
  if (!config::HasSharedTables(config)) return absl::OkStatus();
  for (const ShardModels::Hosted& other : shards.EveryTrained()) {
    if (other.model.name() == config.name()) continue;
    v1::ModelConfig held;
    if (const Entry known = Find(other.model.model_id()); known.model != nullptr) {
      held = known.model->config;
    } else {
      internal::v1::FindModelRequest request;
      request.set_model_id(other.model.model_id());
      auto found = shards_[other.shard]->FindModel(request, context);
      if (absl::IsNotFound(found.status())) continue;  // it has just been dropped
      RETURN_IF_ERROR(found.status());
      held = found->config();
    }
    if (changes_rows) RETURN_IF_ERROR(config::CheckAlone(held, config));
    RETURN_IF_ERROR(config::CheckSameShared(held, config));
    const std::string resource = config::CommonResource(held, config);
    if (resource.empty()) continue;
    // Shards that lost the rows would begin with new ones, beside trained ones on the others.
    if (shards.Judge(other.model.model_id(), 0).state == ModelState::kLost) {
      return absl::FailedPreconditionError(absl::StrCat(
          "resource '", resource, "' is held by model '", held.name(),
          "', which some shards have lost; drop that model first, and all others that hold it"));
    }
    if (!options_.recovers) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "resource '", resource, "' is held by model '", held.name(),
        "'; with storage.durability CHECKPOINT, models cannot share tables: each goes back to a "
        "checkpoint of its own if rows are lost, and these do not agree. Use MEMORY or LOG"));
  }
  return absl::OkStatus();
}

absl::Status ModelRegistry::SettleShared(uint64_t model_id, const SettleChanges& settle,
                                         ShardModels* shards, rpc::CallContext* context) {
  const std::shared_ptr<const ServedModel> known = Find(model_id).model;
  if (known != nullptr && !config::HasSharedTables(known->config)) return absl::OkStatus();
  const ModelVerdict verdict =
      Judge(model_id, known == nullptr ? 0 : known->history, shards, context);
  RETURN_IF_ERROR(shards->complete());
  if (verdict.state != ModelState::kServing) return absl::OkStatus();
  std::shared_ptr<const ServedModel> model = known;
  if (known == nullptr || known->history != verdict.history) {
    ASSIGN_OR_RETURN(model, Fetch(model_id, verdict.history, *shards, context));
    if (!config::HasSharedTables(model->config)) return absl::OkStatus();
  }
  const absl::Status settled = settle(model);
  if (!absl::IsDataLoss(settled)) return settled;
  return absl::UnavailableError(absl::StrCat("a shard lost model '", model->config.name(),
                                             "' just before it was dropped; try again"));
}

}  // namespace emberd::server
