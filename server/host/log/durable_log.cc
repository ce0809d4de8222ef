#include "server/host/log/durable_log.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/buffers.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/shared_tables.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/store.h"
#include "server/files/files.h"
#include "server/host/log/shard_log.h"
#include "server/host/row_files.h"
#include "server/host/shard_codec.h"
#include "server/log/log_files.h"
#include "server/ops/logging.h"

namespace emberd::host {
namespace {

// Changes on their way to the rows while the next ones are being read.
constexpr int kChangesAhead = 8;
// A segment that no log comes to.
constexpr uint64_t kNeverAgain = uint64_t{1} << 63;

absl::Status DoesNotFit(absl::string_view what, const absl::Status& why) {
  // That says nothing about the log, but about this process or the disk.
  if (absl::IsCancelled(why) || absl::IsResourceExhausted(why) || absl::IsFailedPrecondition(why) ||
      absl::IsPermissionDenied(why)) {
    return why;
  }
  return absl::DataLossError(
      absl::StrCat("the log contradicts itself: ", what, ": ", std::string(why.message())));
}

// A process that was killed may need a moment to be gone.
constexpr absl::Duration kLockPatience = absl::Seconds(10);
constexpr absl::Duration kRoomPause = absl::Milliseconds(200);

std::string FolderOf(const v1::StorageConfig& storage, int shard) {
  return absl::StrFormat("%s/shard-%04d", storage.directory(), shard);
}
std::string LogIn(const std::string& folder) { return folder + "/log"; }

}  // namespace

// Brings a shard back to what it knew when its process ended: the rows of the newest checkpoint of
// each model, and then its log, record by record, through the calls that wrote it.
//
// A checkpoint's rows are those at the beginning of some segment. What the log has before that
// segment is read all the same, for votes and groups of all models follow from it, but changes no
// row of this model again.
//
// Models that the log removes later get rows of no account, and their checkpoints need not be there
// any more. Only where one that stays shares its rows does such a model make its changes again.
//
// Shared rows are those of the newest checkpoint of any model that has them, and changes from
// before pass them over, whoever made them (Engine::SetEpoch).
class ShardRecovery {
 public:
  // Does work again and again while it is RESOURCE_EXHAUSTED.
  using AwaitRoom = std::function<absl::Status(absl::FunctionRef<absl::Status()> work)>;
  ShardRecovery(const ShardPlace& place, std::string log_folder, std::string checkpoints,
                const RecoveryParts& parts, AwaitRoom await_room)
      : place_(place),
        log_folder_(std::move(log_folder)),
        checkpoints_(std::move(checkpoints)),
        parts_(parts),
        await_room_(std::move(await_room)) {}

  // Where the log is to go on. FAILED_PRECONDITION: it is that of another shard. DATA_LOSS: the log
  // or a checkpoint is damaged or missing. Nothing is served after an error.
  absl::StatusOr<log::LogEnd> Run() {
    ASSIGN_OR_RETURN(
        const log::LogEnd found,
        log::ReadLog(log_folder_, [this](const Record& record, const log::LogPosition& position) {
          Survey(record, position);
          return absl::OkStatus();
        }));
    // There is none, or the power went before it had begun.
    if (found.shards == 0) return found;
    if (found.shard != place_.index || found.shards != place_.shards) {
      return absl::FailedPreconditionError(absl::StrCat(
          log_folder_, " is the log of shard ", found.shard, " of ", found.shards, ", not of ",
          place_.index, " of ", place_.shards,
          "; start the cluster with as many shards as before, save checkpoints, stop it, move the "
          "folders shard-NNNN away, and restore the checkpoints with the new number"));
    }
    parts_.votes->SetReplaying(true);
    parts_.groups->SetReplaying([this](uint64_t model_id) { return Skips(model_id); });
    ASSIGN_OR_RETURN(
        const log::LogEnd end,
        log::ReadLog(log_folder_, [this](const Record& record, const log::LogPosition& position) {
          return Replay(record, position);
        }));
    WaitForChanges(0);
    // The process ended before it could say what they did.
    const auto unsaid = std::move(made_before_);
    for (const auto& [key, finish] : unsaid) finish(RowCounts());
    for (const auto& [model_id, group] : steps_made_before_) {
      parts_.groups->FinishStep(model_id, group, RowCounts());
    }
    if (Mistake("log.vote_lost")) {
      for (const auto& [model_id, segment] : begins_) {
        const absl::MutexLock lock(&parts_.order->mutex);
        (void)parts_.votes->DropModel(model_id, /*rows_stay=*/true);
      }
    }
    parts_.votes->SetReplaying(false);
    parts_.groups->SetReplaying(nullptr);
    parts_.engine->SetEpoch(~uint64_t{0});
    return end;
  }

  // Makes Run end soon, with CANCELLED; from any thread.
  void Cancel() { progress_.cancelled = true; }

  // While it runs; from any thread.
  const ShardProgress& progress() const { return progress_; }
  // After it: how long it read checkpoints.
  absl::Duration loading() const { return loading_; }

 private:
  using Record = internal::v1::LogRecord;
  using MutationKey = std::pair<std::string, uint64_t>;
  using ModelKey = std::pair<uint64_t, uint64_t>;  // model and history
  using Share = std::pair<std::string, int>;       // a resource, and when it was made anew

  static ModelKey KeyOf(const internal::v1::CreateModelRequest& create) {
    return {create.model_id(), create.history()};
  }

  // Finds the newest rows of each model, before any is read.
  void Survey(const Record& record, const log::LogPosition& position) {
    if (const internal::v1::LogBlob* blob = log::BlobOf(record)) {
      progress_.total_bytes += static_cast<int64_t>(blob->bytes());
    }
    switch (record.kind_case()) {
      case Record::kState:
        for (const internal::v1::LogModel& model : record.state().models()) {
          rows_.try_emplace(KeyOf(model.create()), model.rows());
          if (made_with_.count(model.create().model_id()) == 0) NoteMade(model.create());
        }
        break;
      case Record::kModelMade: {
        const internal::v1::LogModelMade& made = record.model_made();
        internal::v1::LogRows& rows = rows_[KeyOf(made.create())];
        rows.set_segment(position.segment);
        rows.set_checkpoint_id(made.checkpoint_id());
        rows.set_model(made.checkpoint_model());
        NoteMade(made.create());
        break;
      }
      case Record::kModelRemoved: {
        const auto made = made_with_.extract(record.model_removed().model_id());
        if (!made.empty()) removed_.insert({made.key(), made.mapped()});
        break;
      }
      case Record::kCheckpoint:
        NoteCheckpoint(record.checkpoint());
        break;
      case Record::kCheckpoints:
        for (const auto& made : record.checkpoints().made()) NoteCheckpoint(made);
        break;
      default:
        break;
    }
  }

  void NoteMade(const internal::v1::CreateModelRequest& create) {
    made_with_[create.model_id()] = create.history();
    for (const v1::TableConfig& table : create.config().tables()) {
      if (!config::IsShared(table)) continue;
      Share share(config::ResourceText(table.resource()), ++shared_made_);
      for (const ModelKey there : made_with_) {
        for (const Share& held : shares_[there]) share = held.first == share.first ? held : share;
      }
      shares_[KeyOf(create)].push_back(share);
    }
  }

  void NoteCheckpoint(const internal::v1::LogCheckpoint& made) {
    internal::v1::LogRows& rows = rows_[{made.model_id(), made.history()}];
    rows.set_segment(made.segment());
    rows.set_checkpoint_id(made.checkpoint_id());
    rows.clear_model();
  }

  absl::Status Replay(const Record& record, const log::LogPosition& position) {
    segment_ = position.segment;
    parts_.engine->SetEpoch(segment_);
    ReachFailpoint("recovery.record_is_next");
    if (progress_.cancelled) return absl::CancelledError("the process is ending");
    switch (record.kind_case()) {
      case Record::kState:
        return ReplayState(record.state());
      case Record::kModelMade:
        return ReplayModel(record.model_made());
      case Record::kModelRemoved:
        WaitForChanges(0);
        parts_.models->Remove(record.model_removed().model_id()).IgnoreError();
        break;
      case Record::kModelServed:
      case Record::kModelPinned:
      case Record::kModelRenewed:
        parts_.models->Replay(record);
        break;
      case Record::kHistoryDropped:
        parts_.models->RememberDroppedHistory(record.history_dropped().history());
        break;
      case Record::kVote:
        return ReplayVote(record.vote());
      case Record::kAttempt:
        parts_.votes->Find(NameFromProto(record.attempt().mutation()), record.attempt().attempt(),
                           [](const auto&) {});
        break;
      case Record::kDecision:
        if (Mistake("log.replayed_out_of_order") && !late_decision_.has_value()) {
          late_decision_ = record.decision();
          break;
        }
        ReplayDecision(record.decision());
        if (late_decision_.has_value())
          ReplayDecision(*std::exchange(late_decision_, std::nullopt));
        break;
      case Record::kMade:
        ReplayMade(record.made());
        break;
      case Record::kGroupOpened:
        parts_.groups->Open(record.group_opened()).IgnoreError();  // as it was refused before
        break;
      case Record::kPart:
        return ReplayPart(record.part());
      case Record::kStepDecided:
        ReplayStep(record.step_decided());
        break;
      case Record::kStepMade: {
        const internal::v1::LogStepMade& made = record.step_made();
        if (steps_made_before_.erase({made.model_id(), made.group()}) == 0) break;
        parts_.groups->FinishStep(made.model_id(), made.group(), ResultOf(made));
        break;
      }
      case Record::kGroupEnded:
        parts_.groups->EndGeneration(record.group_ended().model_id(), record.group_ended().group(),
                                     /*forget=*/false);
        break;
      case Record::kGroupForgotten:
        parts_.groups->EndGeneration(record.group_forgotten().model_id(),
                                     record.group_forgotten().group(), /*forget=*/true);
        break;
      case Record::kCheckpoint:
      case Record::kCheckpoints:
      case Record::kBegins:
      case Record::KIND_NOT_SET:
        break;
    }
    return absl::OkStatus();
  }

  absl::Status ReplayState(const internal::v1::LogState& state) {
    if (std::exchange(state_is_here_, true)) return absl::OkStatus();
    for (const internal::v1::LogModel& model : state.models()) {
      RETURN_IF_ERROR(WithAdvice(AddModel(model)));
    }
    for (const uint64_t history : state.dropped_histories()) {
      parts_.models->RememberDroppedHistory(history);
    }
    absl::Status read;
    const auto change_of =
        [&](const internal::v1::LogVote& vote) -> std::optional<MutationVotes::Change> {
      auto change = ChangeOf(vote);
      if (change.ok()) return *std::move(change);
      read.Update(change.status());
      return std::nullopt;
    };
    parts_.votes->Remember(
        state, change_of, [this](const Mutation& mutation, MutationVotes::RowsCallback finish) {
          made_before_[{mutation.client_id, mutation.sequence}] = std::move(finish);
        });
    RETURN_IF_ERROR(read);
    for (const internal::v1::LogGroup& group : state.groups()) {
      if (group.applying()) steps_made_before_.insert({group.model_id(), group.group()});
    }
    return parts_.groups->Remember(state, [this](const internal::v1::LogPart& part) {
      return PartOf(part.model_id(), part.blob());
    });
  }

  absl::Status ReplayModel(const internal::v1::LogModelMade& made) {
    internal::v1::LogModel model;
    *model.mutable_create() = made.create();
    model.mutable_rows()->set_segment(segment_);
    RETURN_IF_ERROR(WithAdvice(AddModel(model)));
    if (made.checkpoint_id() == 0) return absl::OkStatus();
    const uint64_t model_id = made.create().model_id();
    parts_.votes->record().Restore(model_id, made.state().clients());
    std::function<void()> dropped;
    {
      const absl::MutexLock lock(&parts_.order->mutex);
      dropped = parts_.groups->Restore(
          model_id, made.state(), {made.finished_groups().begin(), made.finished_groups().end()});
    }
    dropped();
    return absl::OkStatus();
  }

  absl::Status ReplayVote(const internal::v1::LogVote& vote) {
    ASSIGN_OR_RETURN(std::optional<MutationVotes::Change> change, ChangeOf(vote));
    if (!change.has_value()) return absl::OkStatus();
    const auto voted =
        parts_.votes->Stage(NameFromProto(vote.mutation()), vote.attempt(), *std::move(change));
    return voted.ok() ? absl::OkStatus() : DoesNotFit("a vote", voted.status());
  }

  void ReplayDecision(const internal::v1::LogDecision& decision) {
    const Mutation mutation = NameFromProto(decision.mutation());
    if (!decision.commit()) {
      parts_.votes->Decide(mutation, decision.attempt(), false, [](const auto&) {});
      return;
    }
    WaitForChanges(kChangesAhead);
    const uint64_t model_id = parts_.votes->ModelOf(mutation);
    const bool skips = Skips(model_id);
    if (!skips) ChangeBegins(model_id);
    parts_.votes->Decide(mutation, decision.attempt(), true, [this, skips](const auto&) {
      if (!skips) ChangeEnds();
    });
  }

  void ReplayMade(const internal::v1::LogMade& made) {
    const auto found = made_before_.find({made.mutation().client_id(), made.mutation().sequence()});
    if (found == made_before_.end()) return;
    const MutationVotes::RowsCallback finish = std::move(found->second);
    made_before_.erase(found);
    finish(ResultOf(made));
  }

  absl::Status ReplayPart(const internal::v1::LogPart& part) {
    auto checked = PartOf(part.model_id(), part.blob());
    if (absl::IsNotFound(checked.status())) return absl::OkStatus();
    if (!checked.ok()) return DoesNotFit("the part of a step", checked.status());
    ApplyCommand command;
    command.model_id = part.model_id();
    command.group_part = part.part();
    // What did not agree with the other ranks' parts does not do so now.
    parts_.groups->Hold(command, *std::move(checked), part.blob()).IgnoreError();
    return absl::OkStatus();
  }

  void ReplayStep(const internal::v1::DecideStepRequest& request) {
    if (!request.commit()) return parts_.groups->Decide(request, [](const auto&) {});
    WaitForChanges(kChangesAhead);
    const uint64_t model_id = request.model_id();
    if (Skips(model_id)) {
      steps_made_before_.insert({model_id, request.group()});
      return parts_.groups->Decide(request, [](const auto&) {});
    }
    ChangeBegins(model_id);
    parts_.groups->Decide(request, [this](const auto&) { ChangeEnds(); });
  }

  // Waits where models can make no room for this one, as while the disk of evicted rows is full.
  // Without eviction nothing makes room, and the error stands.
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> work) {
    return parts_.engine->memory() == nullptr ? work() : await_room_(work);
  }

  // Says what to do about a checkpoint that the log needs, and that is damaged or missing.
  static absl::Status WithAdvice(const absl::Status& added) {
    if (!absl::IsDataLoss(added)) return added;
    return absl::DataLossError(absl::StrCat(
        added.message(),
        "; bring it back, or move the shards' folders away and restore another checkpoint"));
  }

  // Gives the model the rows from which the log's changes follow.
  absl::Status AddModel(internal::v1::LogModel model) {
    const internal::v1::CreateModelRequest& create = model.create();
    if (const auto newest = rows_.find(KeyOf(create)); newest != rows_.end()) {
      *model.mutable_rows() = newest->second;
    }
    internal::v1::LogRows& rows = *model.mutable_rows();
    if (rows.model().empty()) rows.set_model(create.config().name());
    begins_[create.model_id()] = rows.segment();
    if (removed_.count(KeyOf(create)) > 0) ForgetRows(create, &rows);
    if (rows.checkpoint_id() == 0) {
      return WithRoom([&] { return parts_.models->Remember(model, nullptr, 0, 0); });
    }
    ASSIGN_OR_RETURN(checkpoint::CheckpointChain chain, FindChain(rows));
    for (const internal::v1::CheckpointSource& source : chain) {
      for (const v1::CheckpointFile& file : source.manifest().files()) {
        progress_.total_bytes += file.bytes() / place_.shards;
      }
    }
    WaitForChanges(0);  // of rows that it shares
    ASSIGN_OR_RETURN(const shard::ModelSpec spec, parts_.models->SpecOf(create));
    std::shared_ptr<shard::Model> made;
    RETURN_IF_ERROR(WithRoom([&]() -> absl::Status {
      ASSIGN_OR_RETURN(made, parts_.engine->MakeModel(spec, /*alone=*/false));
      return absl::OkStatus();
    }));
    ASSIGN_OR_RETURN(const internal::v1::ShardState state,
                     LoadState(chain.front(), place_.index, place_.shards));
    const absl::Time start = SteadyNow();
    absl::Status loaded = Load(*made, chain, rows.segment());
    while (files::IsGone(loaded)) {
      ASSIGN_OR_RETURN(checkpoint::CheckpointChain now, FindChain(rows));
      if (now.size() == chain.size()) break;
      chain.swap(now);  // a merge has taken files away
      loaded = Load(*made, chain, rows.segment());
    }
    RETURN_IF_ERROR(loaded);
    loading_ += SteadyNow() - start;
    const int stacks = std::min(made->stack_count(), state.unnumbered_updates_size());
    for (int i = 0; i < stacks && !Mistake("log.rounding_not_restored"); ++i) {
      made->stack(i).set_unnumbered_updates(state.unnumbered_updates(i));
    }
    const v1::CheckpointManifest& newest = chain.front().manifest();
    return parts_.models->Remember(model, made, state.changes(),
                                   SameArrays(*made, newest) ? newest.checkpoint_id() : 0);
  }

  absl::Status Load(shard::Model& model, const checkpoint::CheckpointChain& chain, uint64_t epoch) {
    // As for ShardCheckpoints::Restore; but nobody else compares the files of other shares now.
    if (!SamePlaces(model, chain.front().manifest())) {
      progress_.total_bytes += checkpoint::BytesOf(chain);
      RETURN_IF_ERROR(CheckFiles(chain, /*shard=*/0, /*shards=*/1, progress_));
    }
    return LoadRows(model, chain, parts_.threads, progress_, epoch);
  }

  absl::StatusOr<checkpoint::CheckpointChain> FindChain(const internal::v1::LogRows& rows) const {
    const checkpoint::CheckpointStore store(checkpoints_);
    ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, store.List(rows.model()));
    for (const v1::CheckpointInfo& info : list.checkpoints()) {
      const auto manifest = store.Read(rows.model(), info.name());
      if (!manifest.ok() && !files::IsGone(manifest.status())) return manifest.status();
      if (manifest.ok() && manifest->checkpoint_id() == rows.checkpoint_id()) {
        return store.Chain(rows.model(), info.name());
      }
    }
    RETURN_IF_ERROR(store.ListAll(rows.model()).status());
    return absl::DataLossError(absl::StrCat(
        "the log needs a checkpoint of model '", rows.model(), "' that is no longer in ",
        checkpoints_, " (checkpoint_id ", absl::Hex(rows.checkpoint_id()),
        list.damaged().empty() ? "" : "; damaged there: ", absl::StrJoin(list.damaged(), "; "),
        ")"));
  }

  // Nothing for a change of a model that is gone.
  absl::StatusOr<std::optional<MutationVotes::Change>> ChangeOf(const internal::v1::LogVote& vote) {
    const uint64_t model_id = vote.model_id();
    absl::StatusOr<MutationVotes::Change> change;
    if (vote.assigns_rows()) {
      std::shared_ptr<const void> owner;
      ASSIGN_OR_RETURN(const absl::Span<const char> bytes, Read(vote.blob(), &owner));
      internal::v1::AssignShardRowsRequest request;
      if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
        return absl::InvalidArgumentError("the assignment of rows cannot be read");
      }
      ASSIGN_OR_RETURN(const AssignCommand command, DecodeAssign(request));
      const absl::Status room =
          WithRoom([&] { return (change = parts_.assignment(command)).status(); });
      if (!room.ok()) change = room;
    } else {
      auto part = PartOf(model_id, vote.blob());
      if (part.ok()) {
        change = parts_.update(model_id, *std::move(part));
      } else {
        change = part.status();
      }
    }
    // The model was being dropped when the vote came.
    if (absl::IsNotFound(change.status())) return std::nullopt;
    if (!change.ok()) return DoesNotFit("a change", change.status());
    change->blob = vote.blob();
    change->assigns_rows = vote.assigns_rows();
    change->make = [this, model_id, make = std::move(change->make),
                    key = MutationKey(vote.mutation().client_id(), vote.mutation().sequence())](
                       MutationVotes::RowsCallback done) {
      // After the recovery, all of them are to be made.
      if (Skips(model_id)) {
        made_before_[key] = std::move(done);
        return;
      }
      make(std::move(done));
    };
    return std::optional(*std::move(change));
  }

  // Null: its model is gone.
  absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> PartOf(
      uint64_t model_id, const internal::v1::LogBlob& blob) {
    std::shared_ptr<const void> owner;
    ASSIGN_OR_RETURN(const absl::Span<const char> bytes, Read(blob, &owner));
    std::shared_ptr<const shard::CheckedPart> part;
    RETURN_IF_ERROR(WithRoom([&]() -> absl::Status {
      ASSIGN_OR_RETURN(part, DecodePart(model_id, bytes, owner, parts_.engine, pool_));
      return absl::OkStatus();
    }));
    return part;
  }

  absl::StatusOr<absl::Span<const char>> Read(const internal::v1::LogBlob& blob,
                                              std::shared_ptr<const void>* owner) {
    const auto buffer = std::make_shared<Buffer<char>>();
    ASSIGN_OR_RETURN(const absl::Span<const char> bytes, log::ReadBlob(log_folder_, blob, *buffer));
    progress_.bytes += static_cast<int64_t>(bytes.size());
    *owner = buffer;
    return bytes;
  }

  // Nobody will ever see the rows that the model gets here, but for those that it shares.
  void ForgetRows(const internal::v1::CreateModelRequest& create, internal::v1::LogRows* rows) {
    uint64_t begins = kNeverAgain;
    for (const Share& share : shares_[KeyOf(create)]) {
      bool stays = false, is_saved = false;
      for (const ModelKey other : made_with_) {
        if (!absl::c_linear_search(shares_[other], share)) continue;
        stays = true;
        is_saved |= rows_[other].checkpoint_id() != 0 && rows_[other].segment() >= rows->segment();
      }
      if (!stays) continue;
      if (!is_saved) return;  // all have joined since its rows were in a checkpoint
      begins = 0;
    }
    begins_[create.model_id()] = begins;
    rows->clear_checkpoint_id();
  }

  // Whether the rows of the model have the changes of this segment already, or are of no account.
  bool Skips(uint64_t model_id) const {
    const auto begins = begins_.find(model_id);
    const uint64_t late = Mistake("log.segment_off_by_one") ? 1 : 0;
    return begins != begins_.end() && segment_ < begins->second + late;
  }

  void ChangeBegins(uint64_t model_id) ABSL_LOCKS_EXCLUDED(mutex_) {
    parts_.log->NoteChange(model_id, segment_);
    absl::MutexLock lock(&mutex_);
    ++changing_;
  }

  void ChangeEnds() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --changing_;
    ended_.SignalAll();
  }

  void WaitForChanges(int at_most) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    while (changing_ > at_most) ended_.Wait(&mutex_);
  }

  const ShardPlace place_;
  const std::string log_folder_;
  const std::string checkpoints_;
  const RecoveryParts parts_;
  const AwaitRoom await_room_;
  ShardProgress progress_;
  absl::Duration loading_;
  BufferPool pool_;
  uint64_t segment_ = 0;  // of the record at hand
  bool state_is_here_ = false;
  // By model and history, from what its rows are made; by model, the segment from which its changes
  // are made again.
  std::map<ModelKey, internal::v1::LogRows> rows_;
  std::map<uint64_t, uint64_t> begins_;
  // By model, the history that it was made with; model and history of those that are removed later.
  std::map<uint64_t, uint64_t> made_with_;
  std::set<ModelKey> removed_;
  std::map<ModelKey, std::vector<Share>> shares_;
  int shared_made_ = 0;
  // Changes that are in the rows and wait for the record that says what they did.
  std::map<MutationKey, MutationVotes::RowsCallback> made_before_;
  std::set<std::pair<uint64_t, std::string>> steps_made_before_;
  std::optional<internal::v1::LogDecision> late_decision_;  // of a mistake (base/failpoint.h)
  absl::Mutex mutex_;
  absl::CondVar ended_;
  int changing_ ABSL_GUARDED_BY(mutex_) = 0;  // changes on their way to the rows
};

DurableLog::DurableLog(const v1::StorageConfig& storage, const ShardPlace& place,
                       const RecoveryParts& parts, Describe describe)
    : storage_(storage),
      place_(place),
      folder_(FolderOf(storage, place.index)),
      describe_(std::move(describe)),
      log_(parts.log),
      start_(SteadyNow()) {
  if (storage.durability() != v1::StorageConfig::LOG) return;
  recovery_ = std::make_unique<ShardRecovery>(
      place, LogIn(folder_), storage.checkpoints(), parts,
      [this](absl::FunctionRef<absl::Status()> work) { return AwaitRoom(work); });
  over_ = false;
  thread_ = std::thread([this, models = parts.models] {
    const absl::Status status = Recover();
    if (status.ok()) models->AbandonRestored();
    // Not before: every model had to be able to make room for the next one, and the log takes down
    // what is not pinned any more.
    if (status.ok()) models->PinAgain();
    absl::MutexLock lock(&mutex_);
    if (!status.ok()) {
      if (!absl::IsCancelled(status)) {
        ops::Log(ops::LogLevel::kError, "the shard cannot recover from its log; it serves nothing",
                 {{"folder", folder_}, {"reason", std::string(status.message())}});
      }
      // Nobody is to try again before somebody has done something.
      result_ = absl::FailedPreconditionError(
          absl::StrCat("it could not recover from its log, and serves nothing: ",
                       std::string(status.message())));
    }
    over_ = true;
  });
}

void DurableLog::Cancel() {
  if (recovery_ != nullptr) recovery_->Cancel();
}

DurableLog::~DurableLog() {
  Cancel();
  if (thread_.joinable()) thread_.join();
}

absl::Status DurableLog::LockFolder() {
  RETURN_IF_ERROR(files::MakeFolders(folder_));
  const std::string path = files::PathIn(folder_, "lock");
  lock_ = FileDescriptor(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock_.get() < 0) return files::FileError(errno, path, "cannot be created");
  const absl::Time until = SteadyNow() + kLockPatience;
  while (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return files::FileError(errno, path, "cannot be locked");
    if (SteadyNow() > until) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": another process has locked it: is shard ", place_.index,
          " running twice? Each shard needs its own index, and one storage.directory belongs to "
          "one cluster"));
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<log::LogWriter>> DurableLog::OpenWriter(const log::LogEnd& end) {
  log::LogOptions options;
  options.folder = LogIn(folder_);
  options.shard = place_.index;
  options.shards = place_.shards;
  options.fsync = storage_.fsync();
  options.interval = absl::Milliseconds(storage_.fsync_interval_ms());
  options.older_blobs = end.older_blobs;
  options.spare_bytes = storage_.log_bytes() / 2;
  while (true) {
    internal::v1::LogRecord state;
    describe_(end.next_segment, state.mutable_state());
    auto writer = log::LogWriter::Open(options, end.next_segment, end.next_sequence, state);
    if (!absl::IsResourceExhausted(writer.status())) return writer;
    if (recovery_->progress().cancelled) return absl::CancelledError("the process is ending");
    // From here on nothing changes what the shard knows.
    log_->Refuse(writer.status());
    {
      absl::MutexLock lock(&mutex_);
      over_ = true;
    }
    absl::SleepFor(kRoomPause);
  }
}

absl::Status DurableLog::AwaitRoom(absl::FunctionRef<absl::Status()> work) {
  while (true) {
    const absl::Status status = work();
    const bool waits = absl::IsResourceExhausted(status);
    {
      absl::MutexLock lock(&mutex_);
      if (waits && waits_for_.empty()) {
        ops::Log(ops::LogLevel::kError, "the shard cannot go on with its recovery yet",
                 {{"folder", folder_}, {"reason", std::string(status.message())}});
      }
      waits_for_ = std::string(waits ? status.message() : "");
    }
    if (!waits) return status;
    if (recovery_->progress().cancelled) return absl::CancelledError("the process is ending");
    absl::SleepFor(kRoomPause);
  }
}

absl::Status DurableLog::Recover() {
  RETURN_IF_ERROR(LockFolder());
  ASSIGN_OR_RETURN(const log::LogEnd end, recovery_->Run());
  if (end.torn_bytes > 0) {
    ops::Log(ops::LogLevel::kWarning,
             "the log ends in the middle of a record; the bytes from there on are ignored",
             {{"folder", folder_}, {"bytes", end.torn_bytes}, {"what", end.torn}});
  }
  log_->SetBegins(end.first_segment == 0 ? end.next_segment : end.first_segment);
  ASSIGN_OR_RETURN(auto writer, OpenWriter(end));
  log_->Start(std::move(writer), storage_.log_bytes());
  if (end.first_segment == 0) return absl::OkStatus();
  ops::Log(ops::LogLevel::kInfo, "back from the log",
           {{"folder", folder_},
            {"records", end.next_sequence - 1},
            {"bytes", recovery_->progress().bytes.load()},
            {"checkpoint_seconds", absl::ToDoubleSeconds(recovery_->loading())},
            {"seconds", absl::ToDoubleSeconds(SteadyNow() - start_)}});
  return absl::OkStatus();
}

absl::Status DurableLog::CheckReady() const {
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return result_;
    if (!waits_for_.empty()) {
      return absl::UnavailableError(absl::StrCat("recovering: ", waits_for_));
    }
  }
  constexpr double kGiB = 1 << 30;
  const int64_t total = recovery_->progress().total_bytes;
  const int64_t bytes = std::min<int64_t>(recovery_->progress().bytes, total);
  if (bytes == 0) return absl::UnavailableError("recovering: it reads its log; retry");
  const double share = static_cast<double>(bytes) / static_cast<double>(total);
  const absl::Duration left = (SteadyNow() - start_) * ((1 - share) / share);
  return absl::UnavailableError(
      absl::StrFormat("recovering, %.0f %% of %.1f GiB, about %d s left; retry", 100 * share,
                      static_cast<double>(total) / kGiB, absl::ToInt64Seconds(left) + 1));
}

bool DurableLog::Wait(absl::Duration limit) {
  absl::MutexLock lock(&mutex_);
  return AwaitSteadily(&mutex_, absl::Condition(&over_), limit);
}

v1::LogStatus DurableLog::Status() const {
  v1::LogStatus status;
  if (!on()) return status;
  const absl::Status ready = CheckReady();
  status.set_recovering(absl::IsUnavailable(ready));
  status.set_recovered_bytes(recovery_->progress().bytes);
  status.set_recovery_bytes(recovery_->progress().total_bytes);
  if (status.recovering()) return status;
  const absl::Status failure = ready.ok() ? log_->failure() : ready;
  status.set_failure(std::string(failure.message()));
  status.set_bytes(log_->bytes());
  status.set_records(log_->records());
  return status;
}

}  // namespace emberd::host
