#include "server/host/mutation_votes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "server/group/group.h"

namespace emberd::host {
namespace {

// Of changes that shards compare. What a shard has lost is the newest of its log, so that of each
// client the newest would do, but for those that were in progress at once.
constexpr int kNewestOfClient = 8;
constexpr int kMostNewest = 8192;

constexpr int64_t kMostLeaseMs = 60'000;  // of a pause

}  // namespace

absl::Status CheckMutation(const Mutation& mutation) {
  if (mutation.client_id.empty() || mutation.client_id.size() > 64) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mutation.client_id has ", mutation.client_id.size(), " bytes; it must have 1 to 64"));
  }
  if (mutation.sequence == 0) {
    return absl::InvalidArgumentError("mutation.sequence is 0; it must be >= 1");
  }
  return absl::OkStatus();
}

internal::v1::MutationName NameToProto(const Mutation& mutation) {
  internal::v1::MutationName name;
  name.set_client_id(mutation.client_id);
  name.set_sequence(mutation.sequence);
  name.set_tag(mutation.tag);
  return name;
}

Mutation NameFromProto(const internal::v1::MutationName& name) {
  return {name.client_id(), name.sequence(), name.tag()};
}

absl::StatusOr<Mutation> MutationOf(const internal::v1::MutationName& name) {
  Mutation mutation = NameFromProto(name);
  RETURN_IF_ERROR(CheckMutation(mutation));
  return mutation;
}

MutationRecord::Client& MutationRecord::Touch(const std::string& client_id) {
  auto [it, is_new] = clients_.try_emplace(client_id);
  Client& client = it->second;
  if (!is_new) {
    recency_.splice(recency_.begin(), recency_, client.recency);
    return client;
  }
  recency_.push_front(client_id);
  client.recency = recency_.begin();
  const auto before = forgotten_.find(std::hash<std::string>()(client_id));
  if (before != forgotten_.end()) client.forgotten_up_to = before->second;
  MakeRoom();
  return clients_.at(client_id);
}

bool MutationRecord::IsYoung(const Client& client, uint64_t sequence) const {
  return client.entries.at(sequence).finished + options_.young > SteadyNow();
}

void MutationRecord::MakeRoom() {
  while (recency_.size() > 1) {
    const bool full =
        static_cast<int>(clients_.size()) > options_.clients || entries_ > options_.entries;
    if (!full && entries_ <= options_.entries / 2) return;
    const std::string client_id = recency_.back();
    const Client& quiet = clients_.at(client_id);
    if (!full && !quiet.finished.empty() && IsYoung(quiet, quiet.finished.back())) return;
    recency_.pop_back();
    Forget(client_id);
  }
}

void MutationRecord::Forget(const std::string& client_id) {
  const Client& client = clients_.at(client_id);
  uint64_t highest = client.forgotten_up_to;
  for (const auto& [sequence, entry] : client.entries) highest = std::max(highest, sequence);
  entries_ -= static_cast<int>(client.entries.size());
  clients_.erase(client_id);
  NoteForgotten(std::hash<std::string>()(client_id), highest);
}

void MutationRecord::NoteForgotten(size_t hash, uint64_t highest) {
  const auto [found, is_new] = forgotten_.try_emplace(hash, highest);
  found->second = std::max(found->second, highest);
  if (!is_new) return;
  forgotten_order_.push_back(hash);
  if (static_cast<int>(forgotten_order_.size()) <= options_.forgotten_clients) return;
  forgotten_.erase(forgotten_order_.front());
  forgotten_order_.pop_front();
}

absl::StatusOr<std::optional<RowCounts>> MutationRecord::FindIn(const Client& client,
                                                                const Mutation& mutation) const {
  const auto found = client.entries.find(mutation.sequence);
  if (found != client.entries.end()) {
    const Entry& entry = found->second;
    if (entry.tag != mutation.tag) {
      return absl::InvalidArgumentError(
          absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                       "' was used for another request; each request needs a number of its own"));
    }
    return entry.result;
  }
  if (mutation.sequence > client.forgotten_up_to) return std::optional<RowCounts>();
  return absl::FailedPreconditionError(
      absl::StrCat("mutation.sequence ", mutation.sequence, " of client '", mutation.client_id,
                   "' is older than the record reaches: the newest forgotten number is ",
                   client.forgotten_up_to));
}

absl::StatusOr<std::optional<RowCounts>> MutationRecord::Find(const Mutation& mutation) {
  absl::MutexLock lock(&mutex_);
  const auto client = clients_.find(mutation.client_id);
  if (client != clients_.end()) return FindIn(Touch(mutation.client_id), mutation);
  Client unknown;
  const auto before = forgotten_.find(std::hash<std::string>()(mutation.client_id));
  if (before != forgotten_.end()) unknown.forgotten_up_to = before->second;
  return FindIn(unknown, mutation);
}

void MutationRecord::Keep(Client* client, uint64_t sequence, const Entry& entry) {
  if (client->entries.insert_or_assign(sequence, entry).second) {
    ++entries_;
  } else {  // a restore has brought the number for another model while this change was under way
    std::erase(client->finished, sequence);
  }
  client->finished.push_back(sequence);
  while (static_cast<int>(client->finished.size()) > options_.per_client) {
    const uint64_t oldest = client->finished.front();
    if (IsYoung(*client, oldest) && entries_ <= options_.entries / 4 * 3) return;
    client->forgotten_up_to = std::max(client->forgotten_up_to, oldest);
    client->entries.erase(oldest);
    client->finished.pop_front();
    --entries_;
  }
}

void MutationRecord::Finish(const Mutation& mutation, const RowCounts& result, uint64_t model_id,
                            uint64_t history) {
  absl::MutexLock lock(&mutex_);
  Keep(&Touch(mutation.client_id), mutation.sequence, {mutation.tag, model_id, result, history});
  MakeRoom();
}

void MutationRecord::ListNewest(uint64_t model_id, uint64_t history, Names* names) const {
  absl::MutexLock lock(&mutex_);
  for (const std::string& client_id : recency_) {
    const Client& client = clients_.at(client_id);
    int listed = 0;
    for (auto made = client.finished.rbegin(); made != client.finished.rend(); ++made) {
      const Entry& entry = client.entries.at(*made);
      if (entry.model_id != model_id || entry.history != history) continue;
      if (names->size() == kMostNewest || ++listed > kNewestOfClient) break;
      *names->Add() = NameToProto({client_id, *made, entry.tag});
    }
  }
}

void MutationRecord::Save(uint64_t model_id, Clients* clients) {
  absl::MutexLock lock(&mutex_);
  for (const size_t hash : forgotten_order_) {  // what they have made may have been of this model
    internal::v1::ClientState* const to = clients->Add();
    to->set_name_hash(hash);
    to->set_forgotten_up_to(forgotten_.at(hash));
  }
  for (auto quiet = recency_.rbegin(); quiet != recency_.rend(); ++quiet) {
    const Client& client = clients_.at(*quiet);
    internal::v1::ClientState to;
    to.set_client_id(*quiet);
    to.set_forgotten_up_to(client.forgotten_up_to);
    for (const uint64_t sequence : client.finished) {
      const Entry& entry = client.entries.at(sequence);
      if (entry.model_id != model_id) continue;
      internal::v1::MutationState* mutation = to.add_mutations();
      mutation->set_sequence(sequence);
      mutation->set_tag(entry.tag);
      SetRowCounts(entry.result, mutation);
    }
    // What is forgotten may have been of this model.
    if (to.mutations_size() > 0 || to.forgotten_up_to() > 0) *clients->Add() = std::move(to);
  }
}

void MutationRecord::Restore(uint64_t model_id, const Clients& clients) {
  absl::MutexLock lock(&mutex_);
  for (auto& entry : clients_) {
    Client& client = entry.second;
    std::erase_if(client.finished, [&](uint64_t sequence) {
      return client.entries.at(sequence).model_id == model_id;
    });
    entries_ -= static_cast<int>(absl::erase_if(client.entries, [&](const auto& mutation) {
      return mutation.second.model_id == model_id;
    }));
  }
  for (const internal::v1::ClientState& from : clients) {
    if (from.mutations().empty() && !clients_.contains(from.client_id())) {
      // Takes nobody's place.
      NoteForgotten(
          from.client_id().empty() ? from.name_hash() : std::hash<std::string>()(from.client_id()),
          from.forgotten_up_to());
      continue;
    }
    Client& client = Touch(from.client_id());
    client.forgotten_up_to = std::max(client.forgotten_up_to, from.forgotten_up_to());
    for (const internal::v1::MutationState& mutation : from.mutations()) {
      // The number may be in use for another model by now.
      if (client.entries.contains(mutation.sequence())) continue;
      Keep(&client, mutation.sequence(), {mutation.tag(), model_id, RowCountsOf(mutation)});
    }
    MakeRoom();
  }
  // Also of those that are known here.
  for (auto& [client_id, client] : clients_) {
    const auto before = forgotten_.find(std::hash<std::string>()(client_id));
    if (before == forgotten_.end()) continue;
    client.forgotten_up_to = std::max(client.forgotten_up_to, before->second);
  }
}

void MutationRecord::Describe(internal::v1::LogState* state) const {
  absl::MutexLock lock(&mutex_);
  for (auto quiet = recency_.rbegin(); quiet != recency_.rend(); ++quiet) {
    const Client& client = clients_.at(*quiet);
    internal::v1::LogClient* to = state->add_clients();
    to->set_client_id(*quiet);
    to->set_forgotten_up_to(client.forgotten_up_to);
    for (const uint64_t sequence : client.finished) {
      const Entry& entry = client.entries.at(sequence);
      internal::v1::LogMadeChange* made = to->add_made();
      made->set_model_id(entry.model_id);
      made->set_history(entry.history);
      made->mutable_change()->set_sequence(sequence);
      made->mutable_change()->set_tag(entry.tag);
      SetRowCounts(entry.result, made->mutable_change());
    }
  }
  for (const size_t hash : forgotten_order_) {
    internal::v1::LogForgottenClient* to = state->add_forgotten_clients();
    to->set_name_hash(hash);
    to->set_highest(forgotten_.at(hash));
  }
}

void MutationRecord::Remember(const internal::v1::LogState& state) {
  absl::MutexLock lock(&mutex_);
  for (const internal::v1::LogForgottenClient& from : state.forgotten_clients()) {
    forgotten_[from.name_hash()] = from.highest();
    forgotten_order_.push_back(from.name_hash());
  }
  for (const internal::v1::LogClient& from : state.clients()) {
    Client& client = Touch(from.client_id());
    client.forgotten_up_to = std::max(client.forgotten_up_to, from.forgotten_up_to());
    for (const internal::v1::LogMadeChange& made : from.made()) {
      Keep(&client, made.change().sequence(),
           {made.change().tag(), made.model_id(), RowCountsOf(made.change()), made.history()});
    }
  }
}

void MutationRecord::Refuse(const Mutation& mutation) {
  absl::MutexLock lock(&mutex_);
  Client& client = Touch(mutation.client_id);
  client.forgotten_up_to = std::max(client.forgotten_up_to, mutation.sequence);
}

void NameModel(uint64_t before, uint64_t now, MutationRecord::Clients* clients) {
  for (internal::v1::ClientState& client : *clients) {
    for (internal::v1::MutationState& mutation : *client.mutable_mutations()) {
      mutation.set_tag(mutation.tag() ^ before ^ now);
    }
  }
}

// ---- Votes on those under way

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
  absl::MutexLock lock(&order_->mutex);
  return CheckStage(mutation, attempt);
}

absl::StatusOr<std::optional<RowCounts>> MutationVotes::Stage(const Mutation& mutation,
                                                              uint64_t attempt, Change change) {
  absl::MutexLock lock(&order_->mutex);
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
    absl::MutexLock lock(&order_->mutex);
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
    if (vote->model_id == 0) return NotInCharge(mutation);  // soon there is nothing to find
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
    absl::MutexLock lock(&order_->mutex);
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
  bool keep = false;
  {
    absl::MutexLock lock(&order_->mutex);
    const auto vote = votes_.find(KeyOf(mutation));
    waiting.swap(vote->second.waiting);
    model_id = vote->second.model_id;
    history = vote->second.history;
    keep = rows.ok() && model_id != 0;
    fenced_.erase(vote->second.fence);
    votes_.erase(vote);
    // The decision is in the log: without this record, it says all but the counts.
    log_->Append(MadeRecord(mutation, rows)).IgnoreError();
    if (keep && !late) record_.Finish(mutation, *rows, model_id, history);
  }
  for (const RowsCallback& done : waiting) done(rows);
  if (keep && late) {
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
  uint64_t& fence = votes_[KeyOf(mutation)].fence;
  if (fence != 0) return;
  fence = ++last_fence_;
  fenced_[fence] = mutation;
  while (static_cast<int>(fenced_.size()) > options_.max_fenced) {
    const Mutation oldest = std::move(fenced_.begin()->second);
    fenced_.erase(fenced_.begin());
    const auto vote = votes_.find(KeyOf(oldest));
    vote->second.fence = 0;
    if (vote->second.making || vote->second.change.has_value()) continue;
    votes_.erase(vote);
    record_.Refuse(oldest);
  }
}

std::vector<Mutation> MutationVotes::Undecided(absl::Time since) const {
  absl::MutexLock lock(&order_->mutex);
  std::vector<Mutation> undecided;
  for (const auto& [key, vote] : votes_) {
    if (vote.change.has_value() && vote.since <= since) {
      undecided.push_back({key.first, key.second, vote.tag});
    }
  }
  return undecided;
}

void MutationVotes::ListHeld(uint64_t model_id, HeldList* held) const {
  absl::MutexLock lock(&order_->mutex);
  for (const auto& [key, vote] : votes_) {
    if (vote.model_id != model_id || (!vote.making && !vote.change.has_value())) continue;
    internal::v1::HeldMutation* to = held->Add();
    *to->mutable_name() = NameToProto({key.first, key.second, vote.tag});
    to->set_making(vote.making);
  }
}

void MutationVotes::SetReplaying(bool replaying) {
  absl::MutexLock lock(&order_->mutex);
  replaying_ = replaying;
}

uint64_t MutationVotes::ModelOf(const Mutation& mutation) const {
  absl::MutexLock lock(&order_->mutex);
  const auto vote = votes_.find(KeyOf(mutation));
  return vote == votes_.end() ? 0 : vote->second.model_id;
}

void MutationVotes::Describe(internal::v1::LogState* state) const {
  order_->mutex.AssertHeld();
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
  for (const auto& [place, mutation] : fenced_) {
    const Vote& vote = votes_.at(KeyOf(mutation));
    if (vote.making || vote.change.has_value()) continue;
    internal::v1::LogAttempt* to = state->add_fenced();
    *to->mutable_mutation() = NameToProto(mutation);
    to->set_attempt(vote.attempt);
  }
}

void MutationVotes::Remember(const internal::v1::LogState& state, const ChangeOf& change_of,
                             const Finish& made) {
  record_.Remember(state);
  absl::MutexLock lock(&order_->mutex);
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

std::function<void()> MutationVotes::DropModel(uint64_t model_id, bool rows_stay) {
  order_->mutex.AssertHeld();
  if (!rows_stay) record_.Restore(model_id, {});
  std::vector<std::function<void()>> dropped;
  absl::erase_if(votes_, [&](auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex) {
    Vote& vote = entry.second;
    if (vote.making && vote.model_id == model_id && !rows_stay) vote.model_id = 0;
    if (!vote.change.has_value() || vote.change->model_id != model_id) return false;
    dropped.push_back(Take(&vote).drop);
    fenced_.erase(vote.fence);
    return true;
  });
  return [dropped = std::move(dropped)] {
    for (const auto& drop : dropped) drop();
  };
}

bool ChangeGate::HoldsBack(const Gate& gate, const std::optional<internal::v1::GroupPart>& part) {
  if (gate.pause_id == 0) return false;
  if (gate.group.empty()) return true;
  return part.has_value() && part->group() == gate.group && part->step() > gate.after_step;
}

void ChangeGate::Leave(uint64_t model_id) {
  absl::MutexLock lock(&mutex_);
  const auto found = gates_.find(model_id);
  --found->second.entered;
  if (found->second.entered == 0 && found->second.pause_id == 0) gates_.erase(found);
}

void ChangeGate::Enter(uint64_t model_id, const std::optional<internal::v1::GroupPart>& part,
                       Go go) {
  Pass pass;
  {
    absl::MutexLock lock(&mutex_);
    Gate& gate = gates_[model_id];
    if (HoldsBack(gate, part)) {
      gate.waiting.push_back({part, std::move(go)});
      return;
    }
    ++gate.entered;
    pass = Pass(this, [this, model_id](const void*) { Leave(model_id); });
  }
  go(std::move(pass));
}

absl::StatusOr<int> ChangeGate::Pause(const internal::v1::PauseChangesRequest& request) {
  if (request.pause_id() == 0) {
    return absl::InvalidArgumentError("pause_id is 0; it must be random");
  }
  RETURN_IF_ERROR(group::CheckInRange("lease_ms", request.lease_ms(), int64_t{1}, kMostLeaseMs));
  absl::MutexLock lock(&mutex_);
  Gate& gate = gates_[request.model_id()];
  if (gate.pause_id != 0 && gate.pause_id != request.pause_id()) {
    if (!gate.group.empty() && gate.group == request.group() &&
        gate.after_step == request.after_step()) {
      // Who waits for its turn keeps its part of the step back, for which this pause waits.
      return absl::FailedPreconditionError(
          absl::StrCat("another rank of group '", gate.group, "' has asked for the checkpoint of ",
                       "step ", gate.after_step, "; one rank asks for all"));
    }
    return absl::AbortedError("another checkpoint of the model is being taken; try again");
  }
  gate.pause_id = request.pause_id();
  gate.until = SteadyNow() + absl::Milliseconds(request.lease_ms());
  gate.group = request.group();
  gate.after_step = request.after_step();
  return gate.entered;
}

void ChangeGate::Resume(uint64_t model_id, uint64_t pause_id) {
  std::vector<Waiting> waiting;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = gates_.find(model_id);
    if (found == gates_.end() || found->second.pause_id != pause_id) return;
    found->second.pause_id = 0;
    waiting.swap(found->second.waiting);
    if (found->second.entered == 0) gates_.erase(found);
  }
  for (Waiting& change : waiting) Enter(model_id, change.part, std::move(change.go));
}

bool ChangeGate::Closed(uint64_t model_id, uint64_t pause_id) {
  absl::MutexLock lock(&mutex_);
  const auto found = gates_.find(model_id);
  if (found == gates_.end()) return false;
  const Gate& gate = found->second;
  return gate.pause_id == pause_id && gate.group.empty() && gate.entered == 0 &&
         SteadyNow() < gate.until;
}

void ChangeGate::Sweep(absl::Time now) {
  std::vector<std::pair<uint64_t, uint64_t>> over;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [model_id, gate] : gates_) {
      if (gate.pause_id != 0 && gate.until <= now) over.emplace_back(model_id, gate.pause_id);
    }
  }
  for (const auto& [model_id, pause_id] : over) Resume(model_id, pause_id);
}

}  // namespace emberd::host
