// Models that share tables with others on their shard.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/shared_tables.h"
#include "server/shard/hosted_models.h"

namespace emberd::server {

absl::Status HostedModels::CheckShared(const internal::v1::CreateModelRequest& request,
                                       bool initial_rows) const {
  const v1::ModelConfig& config = request.config();
  if (!config::HasSharedTables(config)) return absl::OkStatus();
  if (request.has_serves()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model '", config.name(), "' serves a checkpoint, but has a table with a resource"));
  }
  absl::MutexLock lock(&mutex_);
  const auto here = models_.find(request.model_id());
  const bool is_here = here != models_.end();
  if (is_here && here->second.history == request.history()) return absl::OkStatus();  // a retry
  const bool resets = is_here && here->second.serving;
  for (const auto& [id, other] : models_) {
    // What is here under its name goes first, or it is refused for that.
    if (other.config.name() == config.name()) continue;
    const std::string resource = config::CommonResource(other.config, config);
    if (resource.empty()) continue;
    if (!initial_rows || resets) RETURN_IF_ERROR(config::CheckAlone(other.config, config));
    RETURN_IF_ERROR(config::CheckSameShared(other.config, config));
    const std::string holder =
        absl::StrCat("model '", other.config.name(), "', which holds resource '", resource, "', ");
    if (other.loading) return absl::UnavailableError(holder + "is being restored; retry");
    if (!log_->on() || other.rows.checkpoint_id() == 0) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(holder,
                     "was restored from a checkpoint, and the shards' logs continue from that: no "
                     "model can share its rows any more. Create the models that share a table "
                     "before anything is restored"));
  }
  return absl::OkStatus();
}

uint64_t HostedModels::OldestOfShared(const v1::ModelConfig& config, uint64_t segment) const {
  for (const auto& [id, other] : models_) {
    if (config::CommonResource(other.config, config).empty()) continue;
    segment = std::min(segment, other.rows.segment());
  }
  return segment;
}

bool HostedModels::KeepLog() const {
  absl::MutexLock lock(&mutex_);
  return std::any_of(models_.begin(), models_.end(), [](const auto& entry) {
    return config::HasSharedTables(entry.second.config);
  });
}

}  // namespace emberd::server
