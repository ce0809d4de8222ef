// Models that an operator keeps in the memory of the SparseCores: the memory manager does it, and
// here it is remembered for as long as the model is here.
#include <map>
#include <string>

#include "base/status.h"
#include "server/ops/logging.h"
#include "server/shard/hosted_models.h"
#include "server/shard/log/log_records.h"

namespace emberd::server {

absl::Status HostedModels::RecordPinned(const std::string& name, bool pinned) {
  const ShardLog::Stay stay(log_);
  absl::MutexLock lock(&mutex_);
  for (auto& [id, model] : models_) {
    if (model.config.name() != name || model.create.pinned() == pinned) continue;
    if (model.is_trained()) RETURN_IF_ERROR(log_->Append(ModelPinnedRecord(id, pinned)));
    model.create.set_pinned(pinned);
  }
  return absl::OkStatus();
}

absl::StatusOr<shard::MemoryChange> HostedModels::SetPinned(const std::string& name, bool pinned) {
  shard::MemoryManager* const memory = engine_->memory();
  absl::MutexLock changing(&changing_);
  ASSIGN_OR_RETURN(shard::MemoryChange change, memory->SetPinned(name, pinned));
  if (const absl::Status recorded = RecordPinned(name, pinned); !recorded.ok()) {
    if (change.changed) memory->SetPinned(name, !pinned).IgnoreError();
    return recorded;
  }
  return change;
}

void HostedModels::PinIfCreatedSo(uint64_t engine_id) {
  std::string name;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(engine_id);
    if (found == models_.end() || !found->second.create.pinned()) return;
    name = found->second.config.name();
  }
  if (engine_->memory() == nullptr) return;
  const absl::Status pinned = engine_->memory()->SetPinned(name, true).status();
  if (pinned.ok()) return;
  ops::Log(ops::LogLevel::kWarning, "a model that was pinned is not pinned any more",
           {{"model", name}, {"shard", place_.index}, {"reason", std::string(pinned.message())}});
  RecordPinned(name, false).IgnoreError();  // a log that cannot be written to says so itself
}

void HostedModels::PinAgain() {
  // By name, so that all shards give up the same ones.
  std::map<std::string, uint64_t> ids;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, model] : models_) ids[model.config.name()] = id;
  }
  for (const auto& [name, id] : ids) PinIfCreatedSo(id);
}

void HostedModels::RememberPinned(uint64_t model_id, bool pinned) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found != models_.end()) found->second.create.set_pinned(pinned);
}

}  // namespace emberd::server
