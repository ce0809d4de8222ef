// What the log keeps of the models on a shard, and how they come back.

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/status.h"
#include "config/shared_tables.h"
#include "server/shard/hosted_models.h"

namespace emberd::server {

bool HostedModels::MayMove(uint64_t model_id, const Model& model) const {
  // Others may have changed what it shares, also such as have been dropped.
  return !config::HasSharedTables(model.config) &&
         log_->LastChange(model_id).value_or(0) < model.rows.segment();
}

void HostedModels::Describe(uint64_t segment, internal::v1::LogState* state) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, model] : models_) {
    if (model.loading || !model.is_trained()) continue;
    internal::v1::LogModel* to = state->add_models();
    *to->mutable_create() = model.create;
    to->set_serving(model.serving);
    *to->mutable_rows() = model.rows;
    if (MayMove(id, model)) to->mutable_rows()->set_segment(segment);
  }
  state->mutable_dropped_histories()->Add(dropped_.begin(), dropped_.end());
}

void HostedModels::SegmentBegun(uint64_t segment) {
  absl::MutexLock lock(&mutex_);
  for (auto& [id, model] : models_) {
    // The record that changes it may be on its way into the new segment: that is early enough.
    if (!model.loading && model.is_trained() && MayMove(id, model)) model.rows.set_segment(segment);
  }
}

std::optional<uint64_t> HostedModels::OldestSegment() const {
  absl::MutexLock lock(&mutex_);
  std::optional<uint64_t> oldest;
  for (const auto& [id, model] : models_) {
    if (model.loading || !model.is_trained()) continue;
    oldest = std::min(oldest.value_or(model.rows.segment()), model.rows.segment());
  }
  return oldest;
}

absl::Status HostedModels::Remember(const internal::v1::LogModel& from,
                                    std::shared_ptr<shard::Model> model, int64_t changes,
                                    uint64_t tracked) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(from.create()));
  const uint64_t id = from.create().model_id();
  if (model != nullptr) {
    RETURN_IF_ERROR(engine_->AddModel(std::move(model)));
  } else {
    RETURN_IF_ERROR(
        engine_->CreateModel(ModelSpecFromPlan(id, from.create().config(), plan, place_.index)));
  }
  Model entry = MakeEntry(from.create(), plan);
  entry.serving = from.serving();
  entry.returned = place_.shards > 1;
  entry.rows = from.rows();
  entry.changes = changes;
  entry.checkpoint_id = config::HasSharedTables(entry.config) ? 0 : tracked;
  entry.restored = from.rows().checkpoint_id() != 0;
  absl::MutexLock lock(&mutex_);
  entry.rows.set_segment(OldestOfShared(entry.config, entry.rows.segment()));
  models_[id] = std::move(entry);
  return absl::OkStatus();
}

absl::StatusOr<shard::ModelSpec> HostedModels::SpecOf(
    const internal::v1::CreateModelRequest& request) const {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(request));
  return ModelSpecFromPlan(request.model_id(), request.config(), plan, place_.index);
}

void HostedModels::Renew(uint64_t model_id, uint64_t history) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found == models_.end()) return;
  found->second.history = history;
  found->second.create.set_history(history);
}

void HostedModels::ServeAgain(const internal::v1::LogModelServed& served) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(served.model_id());
  if (found == models_.end()) return;
  found->second.serving = true;
  if (served.has_limits()) *found->second.create.mutable_limits() = served.limits();
}

void HostedModels::RemoveAgain(uint64_t model_id) { Remove(model_id).IgnoreError(); }

void HostedModels::RememberDroppedHistory(uint64_t history) {
  absl::MutexLock lock(&mutex_);
  RememberDropped(history);
}

}  // namespace emberd::server
