#include "server/host/shard_checkpoints.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "server/checkpoint/manifest.h"
#include "server/files/files.h"
#include "server/ops/logging.h"

namespace emberd::host {
namespace {

using internal::v1::GetTransferResponse;

// Nobody has asked for so long: who began it is gone.
constexpr absl::Duration kTransferPatience = absl::Seconds(20);
// The same where somebody else wants to save.
constexpr absl::Duration kSavePatience = absl::Seconds(5);

bool IsAtRest(const internal::v1::PauseChangesResponse& held) {
  return std::none_of(held.mutations().begin(), held.mutations().end(),
                      [](const auto& mutation) { return mutation.making(); }) &&
         std::none_of(held.groups().begin(), held.groups().end(),
                      [](const auto& group) { return group.making(); });
}

bool IsSaved(const std::vector<internal::v1::BeginSaveRequest>& saves, uint64_t model_id) {
  return absl::c_any_of(saves, [&](const auto& save) { return save.model_id() == model_id; });
}

checkpoint::CheckpointChain ChainOf(const internal::v1::BeginRestoreRequest& request) {
  return {request.chain().begin(), request.chain().end()};
}

}  // namespace

ShardCheckpoints::~ShardCheckpoints() {
  std::vector<TransferPtr> transfers;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [id, transfer] : transfers_) transfers.push_back(transfer);
  }
  for (const TransferPtr& transfer : transfers) {
    transfer->progress.cancelled = true;
    End(*transfer, /*kept=*/false);
  }
}

absl::Status ShardCheckpoints::Start(uint64_t transfer_id, TransferPtr transfer,
                                     std::function<absl::Status(Transfer&)> work) {
  {
    absl::MutexLock lock(&mutex_);
    if (!transfers_.emplace(transfer_id, transfer).second) {
      return absl::AlreadyExistsError("transfer_id is in use; it must be random");
    }
  }
  TaskQueue& tasks = transfer->saves.empty() ? restores_ : saves_;
  auto run = [transfer, work = std::move(work)] {
    const absl::Status status = work(*transfer);
    absl::MutexLock lock(&transfer->mutex);
    transfer->state.set_state(status.ok() ? GetTransferResponse::DONE
                                          : GetTransferResponse::FAILED);
    transfer->state.set_code(static_cast<int>(status.code()));
    transfer->state.set_error(std::string(status.message()));
  };
  absl::Status started = tasks.Submit(std::move(run), [&tasks] {
    return absl::StrCat(tasks.max_queued(), " saves or restores wait already; try again later");
  });
  if (!started.ok()) GiveUp(transfer_id);
  return started;
}

absl::StatusOr<internal::v1::PauseChangesResponse> ShardCheckpoints::PauseChanges(
    const internal::v1::PauseChangesRequest& request) {
  RETURN_IF_ERROR(parts_.models->Check(request.model_id(), request.history()));
  ASSIGN_OR_RETURN(const int entering, parts_.gate->Pause(request));
  // Who has to wait for another save does so without holding anything back.
  if (absl::Status status = MakeWayForSave(request.model_id()); !status.ok()) {
    parts_.gate->Resume(request.model_id(), request.pause_id());
    return status;
  }
  internal::v1::PauseChangesResponse response;
  response.set_entering(entering);
  parts_.votes->ListHeld(request.model_id(), response.mutable_mutations());
  parts_.groups->ListHeld(request.model_id(), response.mutable_groups());
  const HostedModels::Facts facts = parts_.models->FactsOf(request.model_id());
  response.set_changes(facts.changes);
  response.set_checkpoint_id(facts.checkpoint_id);
  // Who hears that all shards hold a step may have it made: none may lose its parts any more.
  RETURN_IF_ERROR(parts_.log->WaitDurable());
  return response;
}

// A coordinator asks about its save ten times in a second: one that does not is gone, or has all
// that it needs of the shard.
absl::Status ShardCheckpoints::MakeWayForSave(uint64_t model_id) {
  std::vector<uint64_t> left;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, other] : transfers_) {
      if (other->snapshot == nullptr || !IsSaved(other->saves, model_id)) continue;
      absl::MutexLock transfer_lock(&other->mutex);
      if (SteadyNow() < other->asked + kSavePatience) {
        return absl::AbortedError("another checkpoint of the model is being saved; try again");
      }
      left.push_back(id);
    }
  }
  for (const uint64_t id : left) GiveUp(id);
  return absl::OkStatus();
}

absl::Status ShardCheckpoints::CheckSettled(const internal::v1::BeginSaveRequest& request) {
  internal::v1::PauseChangesResponse held;
  parts_.votes->ListHeld(request.model_id(), held.mutable_mutations());
  parts_.groups->ListHeld(request.model_id(), held.mutable_groups());
  // A change is counted before it is not on its way any more, so this order misses none.
  if (IsAtRest(held) && parts_.models->FactsOf(request.model_id()).changes == request.changes() &&
      parts_.gate->Closed(request.model_id(), request.pause_id())) {
    return absl::OkStatus();
  }
  return absl::AbortedError("the pause is over, or changes are in progress; try again");
}

absl::Status ShardCheckpoints::BeginSave(const internal::v1::BeginSaveRequest& request) {
  auto transfer = std::make_shared<Transfer>();
  transfer->saves = {request};
  transfer->saves.insert(transfer->saves.end(), request.others().begin(), request.others().end());
  std::vector<uint64_t> model_ids;
  std::vector<internal::v1::ShardState> states;
  for (const internal::v1::BeginSaveRequest& save : transfer->saves) {
    const uint64_t model_id = model_ids.emplace_back(save.model_id());
    RETURN_IF_ERROR(parts_.models->Check(model_id, save.history()));
    RETURN_IF_ERROR(CheckSettled(save));
    RETURN_IF_ERROR(MakeWayForSave(model_id));
    internal::v1::ShardState& state = states.emplace_back();
    parts_.votes->record().Save(model_id, state.mutable_clients());
    parts_.groups->Save(model_id, &state);
    state.set_changes(save.changes());
  }
  const bool changed_only = request.parent_id() != 0;
  if (changed_only &&
      request.parent_id() != parts_.models->FactsOf(request.model_id()).checkpoint_id) {
    return absl::FailedPreconditionError(
        "the shard does not know what has changed since the checkpoint to build on");
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<shard::Snapshot> snapshot,
                   parts_.engine->MakeSnapshot(
                       model_ids, {.changed_only = changed_only, .copy_bytes = copy_bytes_}));
  transfer->snapshot = snapshot;
  for (const shard::StackStore* store : snapshot->stores()) {
    transfer->progress.total_bytes +=
        changed_only ? store->ChangedBytes()
                     : store->BytesPerPartition(store->spec()) * store->partitions() -
                           store->UntouchedBytes();
  }
  for (size_t m = 0; m < states.size(); ++m) {
    const shard::Model& model = *snapshot->models()[m];
    for (int i = 0; i < model.stack_count(); ++i) {
      states[m].add_unnumbered_updates(model.stack(i).unnumbered_updates());
    }
  }
  // Models that do not pause here may change no rows of these between the snapshot and the segment.
  const absl::StatusOr<uint64_t> segment = parts_.begin_segment([&]() -> absl::Status {
    RETURN_IF_ERROR(parts_.models->CheckHolders(model_ids));
    parts_.engine->StartSnapshot(*snapshot);
    return absl::OkStatus();
  });
  // The pause may have ended on the way here, and changes have come in before the rows were fixed.
  absl::Status settled = segment.status();
  for (const auto& save : transfer->saves) settled.Update(CheckSettled(save));
  if (!settled.ok()) {
    parts_.engine->EndSnapshot(snapshot, /*kept=*/false);
    return settled;
  }
  transfer->segment = *segment;
  if (Mistake("log.dropped_before_checkpoint")) parts_.log->DropBefore(*segment);
  const absl::Status started =
      Start(request.transfer_id(), transfer,
            [this, states = std::move(states)](Transfer& save) { return Save(states, save); });
  if (!started.ok()) End(*transfer, /*kept=*/false);
  return started;
}

absl::Status ShardCheckpoints::Save(const std::vector<internal::v1::ShardState>& states,
                                    Transfer& transfer) {
  const std::shared_ptr<shard::Snapshot> snapshot = [&] {
    absl::MutexLock lock(&mutex_);
    return transfer.snapshot;
  }();
  if (snapshot == nullptr) return absl::CancelledError("the save was cancelled");
  std::vector<std::string> folders;
  for (const auto& save : transfer.saves) folders.push_back(save.folder());
  std::vector<CheckpointFiles> files(folders.size());
  absl::Status status = SaveRows(*snapshot, folders, transfer.progress, absl::MakeSpan(files));
  if (!status.ok()) {
    End(transfer, /*kept=*/false);
    return status;
  }
  ReachFailpoint("save.rows_are_here");
  GetTransferResponse saved;
  for (size_t m = 0; m < folders.size(); ++m) {
    GetTransferResponse& of_model = m == 0 ? saved : *saved.add_others();
    of_model.mutable_files()->Swap(&files[m]);
    ASSIGN_OR_RETURN(
        *of_model.mutable_state_file(),
        files::WriteListedFile(folders[m], absl::StrFormat("state.s%04d.pb", place_.index),
                               states[m].SerializeAsString()));
  }
  absl::MutexLock lock(&transfer.mutex);
  transfer.state.MergeFrom(saved);
  return absl::OkStatus();
}

void ShardCheckpoints::End(Transfer& transfer, bool kept) {
  std::shared_ptr<shard::Snapshot> snapshot;
  {
    absl::MutexLock lock(&mutex_);
    snapshot.swap(transfer.snapshot);
  }
  if (snapshot != nullptr) parts_.engine->EndSnapshot(snapshot, kept);
}

absl::Status ShardCheckpoints::CompleteSave(const internal::v1::CompleteSaveRequest& request) {
  ReachFailpoint("save.is_a_checkpoint_now");
  TransferPtr save;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
      return IsSaved(entry.second->saves, request.model_id()) &&
             entry.second->saves[0].checkpoint_id() == request.checkpoint_id();
    });
    if (found == transfers_.end()) return absl::NotFoundError("the save is not known here");
    save = found->second;
    transfers_.erase(found);
  }
  End(*save, /*kept=*/true);
  RETURN_IF_ERROR(parts_.models->SetCheckpoints(save->saves, save->segment));
  // Those before may be deleted when all shards have said so.
  RETURN_IF_ERROR(parts_.log->Sync());
  if (const auto oldest = parts_.models->OldestSegment()) parts_.log->DropBefore(*oldest);
  return absl::OkStatus();
}

absl::Status ShardCheckpoints::BeginRestore(const internal::v1::BeginRestoreRequest& request) {
  if (request.chain().empty()) return absl::InvalidArgumentError("chain is empty");
  auto transfer = std::make_shared<Transfer>();
  transfer->model_id = request.create().model_id();
  transfer->history = request.create().history();
  if (request.check_only()) {
    return Start(request.transfer_id(), transfer, [this, request](Transfer& check) {
      return CheckFiles(ChainOf(request), place_.index, place_.shards, check.progress);
    });
  }
  // Rows of other sizes would be written beside their places.
  RETURN_IF_ERROR(
      checkpoint::CheckSameTables(request.chain(0).manifest(), request.create().config()));
  // At once, so that nobody else begins the same.
  const std::set<std::string> finished = parts_.groups->Finished(transfer->model_id);
  ASSIGN_OR_RETURN(const shard::ModelSpec spec, parts_.models->BeginRestore(request.create()));
  if (!request.create().has_serves()) {
    absl::MutexLock lock(&mutex_);
    finished_[transfer->model_id].insert(finished.begin(), finished.end());
  }
  const auto model = Reserve(request, spec);
  if (!model.ok()) {
    parts_.models->Abandon(transfer->model_id, transfer->history);
    return model.status();
  }
  const auto work = [this, request, model = *model](Transfer& restore) {
    const absl::Status status = Restore(request, model, restore);
    if (!status.ok()) parts_.models->Abandon(restore.model_id, restore.history);
    return status;
  };
  const absl::Status started = Start(request.transfer_id(), transfer, work);
  if (!started.ok()) parts_.models->Abandon(transfer->model_id, transfer->history);
  return started;
}

absl::StatusOr<std::shared_ptr<shard::Model>> ShardCheckpoints::Reserve(
    const internal::v1::BeginRestoreRequest& request, const shard::ModelSpec& spec) {
  const auto model = parts_.engine->MakeModel(spec);
  if (!model.ok() || !request.create().has_serves()) return model;
  const int64_t bytes = std::min((*model)->bytes(), BytesToLoad(spec, ChainOf(request)));
  RETURN_IF_ERROR(parts_.memory->CheckLoad(bytes));
  return model;
}

absl::Status ShardCheckpoints::Restore(const internal::v1::BeginRestoreRequest& request,
                                       const std::shared_ptr<shard::Model>& model,
                                       Transfer& transfer) {
  const checkpoint::CheckpointChain chain = ChainOf(request);
  const internal::v1::CheckpointSource& newest = chain.front();
  const bool serves = request.create().has_serves();  // rows alone
  internal::v1::ShardState state;
  if (!serves) {
    ASSIGN_OR_RETURN(state, LoadState(newest, place_.index, place_.shards));
    NameModel(newest.manifest().model_id(), transfer.model_id, state.mutable_clients());
  }
  if (!SamePlaces(*model, newest.manifest())) {
    // Rows come in another order than that of their files, so checksums say nothing on the way.
    // Every shard compares those of its share; nobody serves before all have done so.
    RETURN_IF_ERROR(CheckFiles(chain, place_.index, place_.shards, transfer.progress));
  }
  RETURN_IF_ERROR(LoadRows(*model, chain, parts_.threads, transfer.progress));
  const int stacks = std::min(model->stack_count(), state.unnumbered_updates_size());
  for (int i = 0; i < stacks; ++i) {
    model->stack(i).set_unnumbered_updates(state.unnumbered_updates(i));
  }
  ReachFailpoint("restore.rows_are_here");
  std::set<std::string> finished;
  {
    absl::MutexLock lock(&mutex_);
    finished = finished_[transfer.model_id];
  }
  internal::v1::LogModelMade made;
  *made.mutable_create() = request.create();
  made.set_checkpoint_id(newest.manifest().checkpoint_id());
  made.set_checkpoint_model(newest.manifest().config().name());
  made.mutable_finished_groups()->Add(finished.begin(), finished.end());
  *made.mutable_state() = state;
  const bool equal = SameArrays(*model, newest.manifest());
  const auto rest = [&] {
    parts_.votes->record().Restore(transfer.model_id, state.clients());
    return parts_.groups->Restore(transfer.model_id, state, finished);
  };
  RETURN_IF_ERROR(parts_.models->EndRestore(made, model, state.changes(),
                                            equal ? newest.manifest().checkpoint_id() : 0, rest));
  if (serves) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  finished_.erase(transfer.model_id);
  return absl::OkStatus();
}

absl::StatusOr<GetTransferResponse> ShardCheckpoints::GetTransfer(
    const internal::v1::GetTransferRequest& request) {
  TransferPtr transfer;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = transfers_.find(request.transfer_id());
    if (found == transfers_.end()) {
      return absl::NotFoundError(
          "the shard does not know this save or restore: it was restarted, "
          "or it gave up because no coordinator asked about the progress");
    }
    transfer = found->second;
  }
  // Rows that were dropped, reset or replaced since must not come back from a checkpoint.
  for (const auto& save : transfer->saves) {
    RETURN_IF_ERROR(parts_.models->Check(save.model_id(), save.history()));
  }
  absl::MutexLock lock(&transfer->mutex);
  transfer->asked = SteadyNow();
  GetTransferResponse response = transfer->state;
  if (response.state() == GetTransferResponse::STATE_UNSPECIFIED) {
    response.set_state(GetTransferResponse::RUNNING);
  }
  response.set_bytes(transfer->progress.bytes);
  response.set_total_bytes(transfer->progress.total_bytes);
  return response;
}

void ShardCheckpoints::GiveUp(uint64_t transfer_id) {
  TransferPtr transfer;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = transfers_.find(transfer_id);
    if (found == transfers_.end()) return;
    transfer = found->second;
    transfers_.erase(found);
  }
  transfer->progress.cancelled = true;
  const bool is_save = !transfer->saves.empty();
  End(*transfer, /*kept=*/false);
  if (!is_save) parts_.models->Abandon(transfer->model_id, transfer->history);
}

void ShardCheckpoints::Sweep(absl::Time now) {
  parts_.gate->Sweep(now);
  std::vector<uint64_t> old;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [id, transfer] : transfers_) {
      absl::MutexLock transfer_lock(&transfer->mutex);
      if (transfer->asked + kTransferPatience <= now) old.push_back(id);
    }
  }
  for (const uint64_t id : old) GiveUp(id);
}

}  // namespace emberd::host
