#include "server/coordinator/model_changes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/returned_rows.h"

namespace emberd::server {
namespace {

bool HasPinnedTable(const v1::ModelConfig& config) {
  return std::any_of(config.tables().begin(), config.tables().end(),
                     [](const v1::TableConfig& table) { return table.residency() == v1::PINNED; });
}

constexpr absl::Duration kUndoDeadline = absl::Seconds(2);

}  // namespace

ShardModels ModelChanges::Ask(rpc::CallContext* context) const {
  ShardModels models = ShardModels::Ask(shards_, context);
  if (!models.complete().ok()) return models;
  for (const ShardModels::Returned& returned : models.EveryReturned()) {
    const auto lost = FindLostChange(shards_, returned.model_id, returned.history, context);
    if (!lost.ok()) continue;  // the rows stay refused, and whoever asks next tries again
    if (!lost->empty()) {
      models.SetLostChange(returned.model_id, *lost);
      continue;
    }
    internal::v1::ServeModelRequest request;
    request.set_model_id(returned.model_id);
    request.set_history(returned.history);
    const auto serve = [&](int shard) {
      return shards_[shard].ServeModel(request, context).status();
    };
    shards_.On(returned.shards, serve).IgnoreError();  // as above: whoever asks next tries again
  }
  return models;
}

internal::v1::CreateModelRequest ModelChanges::MakeRequest(const ServedModel& model,
                                                           uint64_t history,
                                                           const ShardModels& before,
                                                           int shard) const {
  internal::v1::CreateModelRequest request;
  request.set_model_id(model.id);
  *request.mutable_config() = model.config;
  request.set_shards(topology_.shards);
  request.set_sparsecores_per_shard(topology_.sparsecores_per_shard);
  request.set_shard_index(shard);
  request.set_plan_fingerprint(model.plan.fingerprint);
  request.set_history(history);
  const std::optional<internal::v1::HostedModel> here = before.OnShard(shard, model.config.name());
  if (here.has_value()) request.set_replaces(here->history());
  if (model.read_only()) *request.mutable_serves() = model.serves;
  const internal::v1::ModelLimits limits = model.live_limits->Get();
  if (limits.version() > 0) *request.mutable_limits() = limits;
  request.set_pinned(before.IsPinned(model.id) || HasPinnedTable(model.config));
  return request;
}

absl::Status ModelChanges::RestoreOnAll(const ServedModel& model, uint64_t history,
                                        const ShardModels& before, const RowSource& source,
                                        rpc::CallContext* context) {
  if (source.begins != nullptr && !model.read_only()) RETURN_IF_ERROR(source.begins(history));
  ShardTransfers transfers(shards_);
  internal::v1::BeginRestoreRequest request;
  request.set_transfer_id(transfers.id());
  request.mutable_chain()->Add(source.chain.begin(), source.chain.end());
  RETURN_IF_ERROR(shards_.OnAllFirstZero([&](int shard) {
    internal::v1::BeginRestoreRequest here = request;
    *here.mutable_create() = MakeRequest(model, history, before, shard);
    return shards_[shard].BeginRestore(here, context).status();
  }));
  RETURN_IF_ERROR(transfers.Await(context, source.report).status());
  transfers.Keep();
  return absl::OkStatus();
}

absl::Status ModelChanges::Make(const ServedModel& model, uint64_t history,
                                const ShardModels& before, const RowSource* source,
                                rpc::CallContext* context) {
  const auto create = [&](int shard) {
    return shards_[shard].CreateModel(MakeRequest(model, history, before, shard), context).status();
  };
  const auto serve = [&](int shard) {
    internal::v1::ServeModelRequest request;
    request.set_model_id(model.id);
    request.set_history(history);
    const absl::Status status = shards_[shard].ServeModel(request, context).status();
    ReachFailpoint("model.serves");
    return status;
  };
  RETURN_IF_ERROR(source == nullptr ? shards_.OnAllFirstZero(create)
                                    : RestoreOnAll(model, history, before, *source, context));
  if (context->cancelled()) return absl::CancelledError("the caller cancelled the call");
  ReachFailpoint("model.is_made");
  return shards_.OnAllFirstZero(serve);
}

bool ModelChanges::TakeBack(const Leftover& leftover) {
  internal::v1::DropModelRequest request;
  request.set_model_id(leftover.model_id);
  request.set_history(leftover.history);
  request.set_unless_serving(true);
  rpc::CallContext context(SteadyNow() + kUndoDeadline);
  const absl::Status status = shards_[leftover.shard].DropModel(request, &context).status();
  if (leftover.shard == 0) {
    // The word is shard 0's. Where it serves the rows, nothing is left over.
    if (!status.ok()) return absl::IsFailedPrecondition(status);
    std::vector<Leftover> others;
    for (const int shard : shards_.From(1)) {
      others.push_back({leftover.model_id, leftover.history, shard});
    }
    absl::MutexLock lock(&mutex_);
    leftovers_.insert(leftovers_.end(), others.begin(), others.end());
    return true;
  }
  return status.ok() || absl::IsFailedPrecondition(status);
}

void ModelChanges::Undo(uint64_t model_id, uint64_t history) {
  {
    absl::MutexLock lock(&mutex_);
    leftovers_.push_back({model_id, history, 0});
  }
  Retry();
  Retry();  // the other shards, of which the first one has told
}

void ModelChanges::Retry() {
  std::vector<Leftover> leftovers;
  {
    absl::MutexLock lock(&mutex_);
    leftovers.swap(leftovers_);
  }
  if (leftovers.empty()) return;
  std::vector<char> done(leftovers.size());
  threads_->RunEach(static_cast<int>(leftovers.size()),
                    [&](int i) { done[i] = TakeBack(leftovers[i]); });
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < leftovers.size(); ++i) {
    if (!done[i]) leftovers_.push_back(leftovers[i]);
  }
}

absl::StatusOr<bool> ModelChanges::Drop(const std::string& name, uint64_t model_id, uint64_t known,
                                        const ShardModels& before, rpc::CallContext* context) {
  bool found = known != 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const internal::v1::HostedModel& here : before.AllOnShard(static_cast<int>(i), name)) {
      found = true;
      if (known == 0) known = here.history();
    }
  }
  if (!found) return false;
  RETURN_IF_ERROR(shards_.OnAllFirstZero([&](int shard) -> absl::Status {
    internal::v1::DropModelRequest request;
    request.set_model_id(model_id);
    request.set_history(known);
    RETURN_IF_ERROR(shards_[shard].DropModel(request, context).status());
    for (const internal::v1::HostedModel& here : before.AllOnShard(shard, name)) {
      if (here.history() == known) continue;
      request.set_model_id(here.model_id());
      request.set_history(here.history());
      RETURN_IF_ERROR(shards_[shard].DropModel(request, context).status());
    }
    return absl::OkStatus();
  }));
  return true;
}

absl::Status ModelChanges::DropHistory(uint64_t model_id, uint64_t history, bool unless_only,
                                       rpc::CallContext* context) {
  return shards_.OnAllFirstZero([&](int shard) {
    internal::v1::DropModelRequest request;
    request.set_model_id(model_id);
    request.set_history(history);
    request.set_unless_only(unless_only);
    return shards_[shard].DropModel(request, context).status();
  });
}

}  // namespace emberd::server
