#include "server/host/mutation_votes.h"

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::host {
namespace {

using internal::v1::FindMutationResponse;
using internal::v1::LogRecord;

std::string NameOf(const Mutation& mutation) {
  return absl::StrCat("mutation ", mutation.sequence, " of client '", mutation.client_id, "'");
}

LogRecord VoteRecord(const Mutation& mutation, uint64_t attempt,
                     const MutationVotes::Change& change) {
  LogRecord record;
  internal::v1::LogVote* const vote = record.mutable_vote();
  *vote->mutable_mutation() = NameToProto(mutation);
  vote->set_attempt(attempt);
  vote->set_model_id(change.model_id);
  vote->set_assigns_rows(change.assigns_rows);
  *vote->mutable_blob() = change.blob;
  return record;
}

LogRecord AttemptRecord(const Mutation& mutation, uint64_t attempt) {
  LogRecord record;
  *record.mutable_attempt()->mutable_mutation() = NameToProto(mutation);
  record.mutable_attempt()->set_attempt(attempt);
  return record;
}

LogRecord DecisionRecord(const Mutation& mutation, uint64_t attempt, bool commit) {
  LogRecord record;
  *record.mutable_decision()->mutable_mutation() = NameToProto(mutation);
  record.mutable_decision()->set_attempt(attempt);
  record.mutable_decision()->set_commit(commit);
  return record;
}

LogRecord MadeRecord(const Mutation& mutation, const absl::StatusOr<RowCounts>& rows) {
  LogRecord record;
  *record.mutable_made()->mutable_mutation() = NameToProto(mutation);
  SetResult(rows, record.mutable_made());
  return record;
}

absl::Status NotInCharge(const Mutation& mutation) {
  return absl::AbortedError(absl::StrCat("another attempt at ", NameOf(mutation),
                                         " is in progress; retry to get its result"));
}

}  // namespace

absl::Status CheckAttempt(uint64_t attempt) {
  if (attempt != 0) return absl::OkStatus();
  return absl::InvalidArgumentError("attempt is 0; it must be >= 1");
}

absl::StatusOr<MutationVotes::Vote*> MutationVotes::FindVote(const Mutation& mutation) {
  const auto found = votes_.find(KeyOf(mutation));
  if (found == votes_.end()) return nullptr;
  if (found->second.tag == mutation.tag) return &found->second;
  return absl::InvalidArgumentError(
      absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                   "' is in use for another request; each request needs a number of its own"));
}

absl::StatusOr<std::optional<RowCounts>> MutationVotes::CheckStage(const Mutation& mutation,
                                                                   uint64_t attempt) {
  ASSIGN_OR_RETURN(const Vote* const vote, FindVote(mutation));
  if (vote == nullptr) {
    if (Mistake("record.not_asked")) return std::optional<RowCounts>();
    return record_.Find(mutation);
  }
  if (vote->making || vote->change.has_value() || attempt < vote->attempt) {
    return NotInCharge(mutation);
  }
  return std::optional<RowCounts>();
}

absl::StatusOr<std::optional<RowCounts>> MutationVotes::MayStage(const Mutation& mutation,
                                                                 uint64_t attempt) {
  MutexLock lock(&order_->mutex);
  return CheckStage(mutation, attempt);
}

absl::StatusOr<std::optional<RowCounts>> MutationVotes::Stage(const Mutation& mutation,
                                                              uint64_t attempt, Change change) {
  MutexLock lock(&order_->mutex);
  ASSIGN_OR_RETURN(const std::optional<RowCounts> before, CheckStage(mutation, attempt));
  if (before.has_value()) return before;
  // A reader of the log would give it to the rows that have come since under the model's name.
  if (change.check != nullptr) RETURN_IF_ERROR(change.check());
  const bool too_much =
      held_ >= options_.max_held || held_bytes_ + change.bytes > options_.max_held_bytes;
  if (too_much && !replaying_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the request has ", change.bytes, " bytes in addition to the ", held_bytes_, " of ", held_,
        " requests that wait for their decision; budgets.in_flight_bytes is ",
        options_.max_held_bytes, ", and at most ", options_.max_held, " may wait"));
  }
  if (!Mistake("log.append_after_vote")) {
    RETURN_IF_ERROR(log_->Append(VoteRecord(mutation, attempt, change)));
  }
  Hold(mutation, attempt, std::move(change));
  return before;
}

void MutationVotes::Hold(const Mutation& mutation, uint64_t attempt, Change change) {
  ++held_;
  held_bytes_ += change.bytes;
  Vote& vote = votes_[KeyOf(mutation)];
  vote.model_id = change.model_id;
  vote.history = change.history;
  vote.tag = mutation.tag;
  vote.attempt = attempt;
  vote.change = std::move(change);
  vote.since = SteadyNow();
}

void MutationVotes::Find(const Mutation& mutation, uint64_t attempt, FoundCallback done) {
  absl::StatusOr<std::optional<Found>> found = std::nullopt;
  {
    MutexLock lock(&order_->mutex);
    found = TryFind(mutation, attempt, &done);
  }
  if (!found.ok()) return done(found.status());
  if (found->has_value()) done(**found);
}

absl::StatusOr<std::optional<MutationVotes::Found>> MutationVotes::TryFind(const Mutation& mutation,
                                                                           uint64_t attempt,
                                                                           FoundCallback* done) {
  ASSIGN_OR_RETURN(Vote * vote, FindVote(mutation));
  if (vote == nullptr) {
    ASSIGN_OR_RETURN(const std::optional<RowCounts> before, record_.Find(mutation));
    if (before.has_value()) return Found{FindMutationResponse::COMMITTED, *before, 0};
    if (attempt == 0) return Found{};
    RETURN_IF_ERROR(log_->Append(AttemptRecord(mutation, attempt)));
    vote = &votes_[KeyOf(mutation)];
    vote->attempt = attempt;
    vote->tag = mutation.tag;
    KeepFence(mutation);
  }
  if (vote->making) {
    vote->waiting.push_back([done = std::move(*done)](absl::StatusOr<RowCounts> rows) {
      if (!rows.ok()) return done(rows.status());
      done(Found{FindMutationResponse::COMMITTED, *rows, 0});
    });
    return std::nullopt;
  }
  if (attempt != 0) {
    if (attempt < vote->attempt) return NotInCharge(mutation);
    if (attempt > vote->attempt) RETURN_IF_ERROR(log_->Append(AttemptRecord(mutation, attempt)));
    vote->attempt = attempt;
  }
  return Found{
      vote->change.has_value() ? FindMutationResponse::STAGED : FindMutationResponse::UNKNOWN,
      {},
      vote->attempt};
}

void MutationVotes::Decide(const Mutation& mutation, uint64_t attempt, bool commit,
                           RowsCallback done) {
  absl::StatusOr<std::optional<RowCounts>> rows = std::nullopt;
  std::function<void()> drop;
  {
    MutexLock lock(&order_->mutex);
    rows = TryDecide(mutation, attempt, commit, &done, &drop);
  }
  if (drop != nullptr) drop();
  if (!rows.ok()) return done(rows.status());
  if (rows->has_value()) done(**rows);
}

absl::StatusOr<std::optional<RowCounts>> MutationVotes::TryDecide(const Mutation& mutation,
                                                                  uint64_t attempt, bool commit,
                                                                  RowsCallback* done,
                                                                  std::function<void()>* drop) {
  ASSIGN_OR_RETURN(Vote* const vote, FindVote(mutation));
  if (vote == nullptr) {
    // The word has come before, or nothing was ever held.
    ASSIGN_OR_RETURN(const std::optional<RowCounts> before, record_.Find(mutation));
    if (before.has_value() == commit) return before.value_or(RowCounts());
    return NotInCharge(mutation);
  }
  if (commit && vote->making) {
    vote->waiting.push_back(std::move(*done));
    return std::nullopt;
  }
  if (vote->making || attempt != vote->attempt) return NotInCharge(mutation);
  if (!vote->change.has_value()) {
    if (!commit) return RowCounts();
    return absl::AbortedError(absl::StrCat("the shard no longer holds ", NameOf(mutation)));
  }
  const LogRecord record = DecisionRecord(mutation, attempt, commit);
  if (commit) {
    if (Mistake("log.append_after_vote")) {
      RETURN_IF_ERROR(log_->Append(VoteRecord(mutation, attempt, *vote->change)));
    }
    if (!Mistake("log.no_decision")) {
      RETURN_IF_ERROR(log_->AppendChange(vote->model_id, record));
    }
    vote->waiting.push_back(std::move(*done));
    vote->making = true;
    ++order_->changes;
    const Change change = Take(vote);
    change.make([this, mutation](const absl::StatusOr<RowCounts>& made) { Made(mutation, made); });
    return std::nullopt;
  }
  RETURN_IF_ERROR(log_->Append(record));
  *drop = Take(vote).drop;
  KeepFence(mutation);
  return RowCounts();
}

void MutationVotes::Made(const Mutation& mutation, const absl::StatusOr<RowCounts>& rows) {
  const bool late = Mistake("record.after_reply");
  std::vector<RowsCallback> waiting;
  uint64_t model_id = 0, history = 0;
  {
    MutexLock lock(&order_->mutex);
    const auto vote = votes_.find(KeyOf(mutation));
    waiting.swap(vote->second.waiting);
    model_id = vote->second.model_id;
    history = vote->second.history;
    votes_.erase(vote);
    // The decision is in the log: without this record, it says all but the counts.
    log_->Append(MadeRecord(mutation, rows)).IgnoreError();
    if (rows.ok() && !late) record_.Finish(mutation, *rows, model_id, history);
  }
  for (const RowsCallback& done : waiting) done(rows);
  if (rows.ok() && late) {
    ReachFailpoint("record.is_next");
    record_.Finish(mutation, *rows, model_id, history);
  }
}

MutationVotes::Change MutationVotes::Take(Vote* vote) {
  Change change = *std::exchange(vote->change, std::nullopt);
  --held_;
  held_bytes_ -= change.bytes;
  return change;
}

void MutationVotes::KeepFence(const Mutation& mutation) {
  // Once, however often it is tried: its tries would push out what others ask for, and itself.
  if (std::exchange(votes_[KeyOf(mutation)].listed, true)) return;
  fenced_.push_back(mutation);
  while (static_cast<int>(fenced_.size()) > options_.max_fenced) {
    const Mutation oldest = std::move(fenced_.front());
    fenced_.pop_front();
    const auto vote = votes_.find(KeyOf(oldest));
    if (vote == votes_.end()) continue;
    vote->second.listed = false;
    if (vote->second.making || vote->second.change.has_value()) continue;
    votes_.erase(vote);
    record_.Refuse(oldest);
  }
}

std::vector<Mutation> MutationVotes::Undecided(absl::Time since) const {
  MutexLock lock(&order_->mutex);
  std::vector<Mutation> undecided;
  for (const auto& [key, vote] : votes_) {
    if (vote.change.has_value() && vote.since <= since) {
      undecided.push_back({key.first, key.second, vote.tag});
    }
  }
  return undecided;
}

void MutationVotes::ListHeld(uint64_t model_id, HeldList* held) const {
  MutexLock lock(&order_->mutex);
  for (const auto& [key, vote] : votes_) {
    if (vote.model_id != model_id || (!vote.making && !vote.change.has_value())) continue;
    internal::v1::HeldMutation* to = held->Add();
    *to->mutable_name() = NameToProto({key.first, key.second, vote.tag});
    to->set_making(vote.making);
  }
}

void MutationVotes::SetReplaying(bool replaying) {
  MutexLock lock(&order_->mutex);
  replaying_ = replaying;
}

uint64_t MutationVotes::ModelOf(const Mutation& mutation) const {
  MutexLock lock(&order_->mutex);
  const auto vote = votes_.find(KeyOf(mutation));
  return vote == votes_.end() ? 0 : vote->second.model_id;
}

void MutationVotes::Describe(internal::v1::LogState* state) const {
  order_->mutex.AssumeHeld();
  if (!Mistake("log.records_not_in_state")) record_.Describe(state);
  for (const auto& [key, vote] : votes_) {
    if (!vote.making && !vote.change.has_value()) continue;
    const Mutation mutation{key.first, key.second, vote.tag};
    internal::v1::LogHeldVote* to = state->add_votes();
    *to->mutable_vote()->mutable_mutation() = NameToProto(mutation);
    to->mutable_vote()->set_model_id(vote.model_id);
    to->mutable_vote()->set_attempt(vote.attempt);
    to->set_making(vote.making);
    to->set_history(vote.history);
    if (!vote.change.has_value()) continue;
    *to->mutable_vote() = VoteRecord(mutation, vote.attempt, *vote.change).vote();
    KeepOldestBlob(vote.change->blob, state);
  }
  for (const Mutation& mutation : fenced_) {
    const auto vote = votes_.find(KeyOf(mutation));
    if (vote == votes_.end() || vote->second.making || vote->second.change.has_value()) continue;
    internal::v1::LogAttempt* to = state->add_fenced();
    *to->mutable_mutation() = NameToProto(mutation);
    to->set_attempt(vote->second.attempt);
  }
}

void MutationVotes::Remember(const internal::v1::LogState& state, const ChangeOf& change_of,
                             const Finish& made) {
  record_.Remember(state);
  MutexLock lock(&order_->mutex);
  for (const internal::v1::LogHeldVote& from : state.votes()) {
    const Mutation mutation = NameFromProto(from.vote().mutation());
    std::optional<Change> change = from.making() ? std::nullopt : change_of(from.vote());
    if (change.has_value()) {
      Hold(mutation, from.vote().attempt(), *std::move(change));
    } else if (from.making()) {
      Vote& vote = votes_[KeyOf(mutation)];
      vote.model_id = from.vote().model_id();
      vote.history = from.history();
      vote.tag = mutation.tag;
      vote.attempt = from.vote().attempt();
      vote.making = true;
      made(mutation,
           [this, mutation](const absl::StatusOr<RowCounts>& rows) { Made(mutation, rows); });
    }
  }
  for (const internal::v1::LogAttempt& from : state.fenced()) {
    const Mutation mutation = NameFromProto(from.mutation());
    Vote& vote = votes_[KeyOf(mutation)];
    vote.tag = mutation.tag;
    vote.attempt = from.attempt();
    KeepFence(mutation);
  }
}

std::function<void()> MutationVotes::DropModel(uint64_t model_id) {
  order_->mutex.AssumeHeld();
  std::vector<std::function<void()>> dropped;
  absl::erase_if(votes_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex) {
    Vote& vote = entry.second;
    if (!vote.change.has_value() || vote.change->model_id != model_id) return false;
    dropped.push_back(Take(&vote).drop);
    return true;
  });
  return [dropped = std::move(dropped)] {
    for (const auto& drop : dropped) drop();
  };
}

}  // namespace emberd::host
