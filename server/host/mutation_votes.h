// The votes of one shard on mutations, which are the ApplyGradients and AssignRows of trainers:
// each is made on all shards or on none, and once, whoever dies on the way.
//
//   coordinator                                 shard
//   Stage(mutation, attempt, change)  ------->  holds the change: its vote
//   Decide(mutation, attempt, commit) ------->  hands it to the engine, or drops it
//
// A vote survives its coordinator, and no clock takes it back. Whoever gets the retry asks all
// shards under an attempt of a larger number (Find), which is then in charge: votes and words of
// others come to nothing. If a shard has made the change, all others have made it or hold it, and
// are told to make it; if none has, none ever will, and the retry begins anew. See docs/change.md.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/host/log/shard_log.h"
#include "server/host/mutation_record.h"

namespace emberd::host {

// INVALID_ARGUMENT unless it is at least 1.
absl::Status CheckAttempt(uint64_t attempt);

// Thread-safe.
class MutationVotes {
 public:
  using RowsCallback = std::function<void(absl::StatusOr<RowCounts>)>;

  struct Options {
    int64_t max_held_bytes = 0;  // of changes that wait for a decision
    int max_held = 65536;        // changes
    // Mutations of which nothing is held, but whose attempt in charge must be remembered. The
    // oldest makes room, and its number is refused from then on.
    int max_fenced = 65536;
    MutationRecordOptions record = {};
  };

  // A change that was checked: it cannot fail, unless its model is dropped.
  struct Change {
    uint64_t model_id = 0;
    uint64_t history = 0;  // of the rows
    int64_t bytes = 0;
    // Hands it to the engine. Runs under the sequencer's lock, so the callback must not run before
    // it returns.
    std::function<void(RowsCallback)> make;
    // Gives back what it holds: it will not be made.
    std::function<void()> drop;
    // NOT_FOUND: its model was dropped since it was checked.
    std::function<absl::Status()> check;
    // What the log has of it.
    internal::v1::LogBlob blob = {};
    bool assigns_rows = false;
  };

  struct Found {
    internal::v1::FindMutationResponse::State state = internal::v1::FindMutationResponse::UNKNOWN;
    RowCounts rows;        // COMMITTED
    uint64_t attempt = 0;  // in charge; 0: none, or COMMITTED
  };
  using FoundCallback = std::function<void(absl::StatusOr<Found>)>;

  // `order` and `log` must outlive it.
  MutationVotes(Options options, Sequencer* order, ShardLog* log)
      : options_(options), order_(order), log_(log), record_(options.record) {}

  // Asks before the work of checking a change: nothing if the attempt may bring one; a value if the
  // mutation was made, with this result. ABORTED: another attempt is in charge, or has brought its
  // change. INVALID_ARGUMENT and FAILED_PRECONDITION as in MutationRecord::Find.
  absl::StatusOr<std::optional<RowCounts>> MayStage(const Mutation& mutation, uint64_t attempt)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  // Holds the change until its decision. The same answers, and RESOURCE_EXHAUSTED with the figures;
  // unless nothing is returned, the caller keeps what the change would have given back.
  absl::StatusOr<std::optional<RowCounts>> Stage(const Mutation& mutation, uint64_t attempt,
                                                 Change change) ABSL_LOCKS_EXCLUDED(order_->mutex);

  // See FindMutation in shard_service.proto. Answers about a change on its way to the rows when it
  // is there.
  void Find(const Mutation& mutation, uint64_t attempt, FoundCallback done)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  // See DecideMutation in shard_service.proto.
  void Decide(const Mutation& mutation, uint64_t attempt, bool commit, RowsCallback done)
      ABSL_LOCKS_EXCLUDED(order_->mutex);

  std::vector<Mutation> Undecided(absl::Time since) const ABSL_LOCKS_EXCLUDED(order_->mutex);
  // What is held of a model, or on its way to the rows.
  using HeldList = google::protobuf::RepeatedPtrField<internal::v1::HeldMutation>;
  void ListHeld(uint64_t model_id, HeldList* held) const ABSL_LOCKS_EXCLUDED(order_->mutex);
  // Of finished mutations.
  MutationRecord& record() { return record_; }

  // For the log, under the lock of `order`: all that is known here.
  void Describe(internal::v1::LogState* state) const;
  // Puts what a log has into the place of nothing. `change_of` gives a held change, and nothing for
  // one that was made already and is not finished: `made` gets what finishes it.
  using ChangeOf = std::function<std::optional<Change>(const internal::v1::LogVote& vote)>;
  using Finish = std::function<void(const Mutation& mutation, RowsCallback finish)>;
  void Remember(const internal::v1::LogState& state, const ChangeOf& change_of, const Finish& made)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  // While the log is read: what was taken before is taken again, whatever the budgets are now.
  void SetReplaying(bool replaying) ABSL_LOCKS_EXCLUDED(order_->mutex);
  // Of the change that is held; 0: none is.
  uint64_t ModelOf(const Mutation& mutation) const ABSL_LOCKS_EXCLUDED(order_->mutex);

  // Under the lock of `order`: drops what is held for a model that is gone. What is returned runs
  // when the lock is free.
  [[nodiscard]] std::function<void()> DropModel(uint64_t model_id);

 private:
  using Key = std::pair<std::string, uint64_t>;  // client, sequence
  // A mutation that is not finished.
  struct Vote {
    uint64_t model_id = 0;  // of the change that is, or was, held
    uint64_t history = 0;
    uint64_t tag = 0;
    uint64_t attempt = 0;          // in charge
    std::optional<Change> change;  // held
    bool making = false;           // on its way to the rows
    bool listed = false;           // in fenced_
    std::vector<RowsCallback> waiting;
    absl::Time since;
  };
  static Key KeyOf(const Mutation& mutation) { return {mutation.client_id, mutation.sequence}; }

  // The unfinished mutation; null: there is none. An error as in MutationRecord::Find.
  absl::StatusOr<Vote*> FindVote(const Mutation& mutation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  absl::StatusOr<std::optional<RowCounts>> CheckStage(const Mutation& mutation, uint64_t attempt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // The answer to Find, unless it comes later.
  absl::StatusOr<std::optional<Found>> TryFind(const Mutation& mutation, uint64_t attempt,
                                               FoundCallback* done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // The answer to Decide, unless it comes later. `drop` is to be called without the lock.
  absl::StatusOr<std::optional<RowCounts>> TryDecide(const Mutation& mutation, uint64_t attempt,
                                                     bool commit, RowsCallback* done,
                                                     std::function<void()>* drop)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  void Made(const Mutation& mutation, const absl::StatusOr<RowCounts>& rows)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  Change Take(Vote* vote) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  void Hold(const Mutation& mutation, uint64_t attempt, Change change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // Nothing is held any more, but the attempt in charge is remembered.
  void KeepFence(const Mutation& mutation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);

  const Options options_;
  Sequencer* const order_;
  ShardLog* const log_;
  MutationRecord record_;
  bool replaying_ ABSL_GUARDED_BY(order_->mutex) = false;
  absl::flat_hash_map<Key, Vote> votes_ ABSL_GUARDED_BY(order_->mutex);
  std::deque<Mutation> fenced_ ABSL_GUARDED_BY(order_->mutex);  // oldest first; some are over
  int64_t held_ ABSL_GUARDED_BY(order_->mutex) = 0;
  int64_t held_bytes_ ABSL_GUARDED_BY(order_->mutex) = 0;
};

}  // namespace emberd::host
