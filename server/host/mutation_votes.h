// What one shard knows of mutations, which are the ApplyGradients and AssignRows of trainers: its
// votes on those under way, and a record of those that were carried out. Each is made on all shards
// or on none, and once, whoever dies on the way.
//
//   coordinator                                 shard
//   Stage(mutation, attempt, change)  ------->  holds the change: its vote
//   Decide(mutation, attempt, commit) ------->  hands it to the engine, or drops it
//
// A vote survives its coordinator, and no clock takes it back. Whoever gets the retry asks all
// shards under an attempt of a larger number (Find), which is then in charge: votes and words of
// others come to nothing. If a shard has made the change, all others have made it or hold it, and
// are told to make it; if none has, none ever will, and the retry begins anew. See docs/change.md.
//
// And the gate before the votes, at which changes wait while a checkpoint's moment is fixed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"
#include "server/host/log/shard_log.h"

namespace emberd::host {

// What an update did, in rows.
struct RowCounts {
  int64_t updated = 0;
  int64_t skipped = 0;  // left as they were: their gradient was not finite

  RowCounts& operator+=(const RowCounts& other) {
    updated += other.updated;
    skipped += other.skipped;
    return *this;
  }
  bool operator==(const RowCounts& other) const = default;
};

// To and from the answers of the services.
template <typename Message>
RowCounts RowCountsOf(const Message& message) {
  return {message.rows_updated(), message.rows_skipped()};
}
template <typename Message>
void SetRowCounts(const RowCounts& rows, Message* message) {
  message->set_rows_updated(rows.updated);
  message->set_rows_skipped(rows.skipped);
}
// To and from the log, where a change fails only if its model was dropped.
template <typename Message>
void SetResult(const absl::StatusOr<RowCounts>& rows, Message* message) {
  message->set_failed(!rows.ok());
  if (rows.ok()) SetRowCounts(*rows, message);
}
template <typename Message>
absl::StatusOr<RowCounts> ResultOf(const Message& message) {
  if (message.failed()) return absl::NotFoundError("its model was dropped");
  return RowCountsOf(message);
}

// Which request of which client. `tag` tells requests apart that wrongly share a sequence number: a
// hash of what may not change from one try to the next. An update may be tried with another batch,
// as after its coordinator died; an assignment names its rows.
struct Mutation {
  std::string client_id;
  uint64_t sequence = 0;
  uint64_t tag = 0;
};

// The tag of all updates of a model: of nothing but the model.
inline uint64_t UpdateTag(uint64_t model_id) { return ~model_id; }

// INVALID_ARGUMENT unless client_id has 1 to 64 bytes and sequence is at least 1.
absl::Status CheckMutation(const Mutation& mutation);

// To and from messages.
internal::v1::MutationName NameToProto(const Mutation& mutation);
Mutation NameFromProto(const internal::v1::MutationName& name);
// As CheckMutation says.
absl::StatusOr<Mutation> MutationOf(const internal::v1::MutationName& name);

// INVALID_ARGUMENT unless it is at least 1.
absl::Status CheckAttempt(uint64_t attempt);

struct MutationRecordOptions {
  // The newest finished requests kept of one client. Older sequence numbers are refused, never
  // applied again.
  int per_client = 1024;
  // Requests younger than this are kept beyond that, while a quarter of `entries` is free: another
  // shard may still hold its vote, and who decides on that has to know whether it was made here.
  absl::Duration young = absl::ZeroDuration();
  // Clients, and requests of all clients together: beyond either, the client that was quiet for
  // longest is forgotten; beyond half of `entries`, if it has none that is young.
  int clients = 65536;
  int entries = 1 << 20;
  // Forgotten clients of whom one number is still known: what they asked for up to it is refused.
  int forgotten_clients = 1 << 20;
};

// Remembers which mutations were carried out, so that a retry is answered and not applied again.
// Thread-safe.
class MutationRecord {
 public:
  explicit MutationRecord(MutationRecordOptions options = {}) : options_(options) {}

  // The result of a request that was carried out; nothing for one that is new. INVALID_ARGUMENT:
  // the number belongs to another request. FAILED_PRECONDITION: the number is older than the record
  // reaches.
  absl::StatusOr<std::optional<RowCounts>> Find(const Mutation& mutation);
  // `model_id` and `history`: whose rows it changed; 0: not known.
  void Finish(const Mutation& mutation, const RowCounts& result, uint64_t model_id = 0,
              uint64_t history = 0);
  // From now on the number and all smaller ones that were not carried out are too old.
  void Refuse(const Mutation& mutation);

  // For checkpoints: what was carried out on a model, and puts that in the place of what is known.
  // A number that was too old for a client stays so.
  using Clients = google::protobuf::RepeatedPtrField<internal::v1::ClientState>;
  void Save(uint64_t model_id, Clients* clients);
  void Restore(uint64_t model_id, const Clients& clients);

  // What shards compare when one comes back from its log: see ListMade in shard_service.proto.
  using Names = google::protobuf::RepeatedPtrField<internal::v1::MutationName>;
  void ListNewest(uint64_t model_id, uint64_t history, Names* names) const;

  // All that is known, for a log, and that put into an empty record.
  void Describe(internal::v1::LogState* state) const;
  void Remember(const internal::v1::LogState& state);

 private:
  struct Entry {
    uint64_t tag = 0;
    uint64_t model_id = 0;
    RowCounts result;
    uint64_t history = 0;
    absl::Time finished = SteadyNow();
  };
  struct Client {
    absl::flat_hash_map<uint64_t, Entry> entries;
    std::deque<uint64_t> finished;  // in order of finishing
    uint64_t forgotten_up_to = 0;   // highest sequence number that was dropped from the record
    std::list<std::string>::iterator recency;
  };
  // The client, which is now the most recent.
  Client& Touch(const std::string& client_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<RowCounts>> FindIn(const Client& client,
                                                  const Mutation& mutation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts a finished request in the client's place for it.
  void Keep(Client* client, uint64_t sequence, const Entry& entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsYoung(const Client& client, uint64_t sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets clients until the record is within its limits. The most recent one stays.
  void MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& client_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `hash`: of the client's id.
  void NoteForgotten(size_t hash, uint64_t highest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const MutationRecordOptions options_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Client> clients_ ABSL_GUARDED_BY(mutex_);
  std::list<std::string> recency_ ABSL_GUARDED_BY(mutex_);  // most recent first
  int entries_ ABSL_GUARDED_BY(mutex_) = 0;                 // of all clients
  // By hash of a forgotten client's name: its highest number.
  absl::flat_hash_map<size_t, uint64_t> forgotten_ ABSL_GUARDED_BY(mutex_);
  std::deque<size_t> forgotten_order_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

// A model that is restored with another config has another id. Every tag ends with an XOR of the
// model's id: puts that of `now` in the place of that of `before`.
void NameModel(uint64_t before, uint64_t now, MutationRecord::Clients* clients);

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
  // Holds the change until its decision. The same answers, and RESOURCE_EXHAUSTED with the figures.
  // If it answers anything but nothing, the caller keeps what the change would have given back.
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
  // Takes what a log has, before anything is known here. `change_of` gives a held change, and
  // nothing for one that was made already and is not finished: `made` gets what finishes it.
  using ChangeOf = std::function<std::optional<Change>(const internal::v1::LogVote& vote)>;
  using Finish = std::function<void(const Mutation& mutation, RowsCallback finish)>;
  void Remember(const internal::v1::LogState& state, const ChangeOf& change_of, const Finish& made)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  // While the log is read: what was taken before is taken again, whatever the budgets are now.
  void SetReplaying(bool replaying) ABSL_LOCKS_EXCLUDED(order_->mutex);
  // Of the change that is held; 0: none is.
  uint64_t ModelOf(const Mutation& mutation) const ABSL_LOCKS_EXCLUDED(order_->mutex);

  // Under the lock of `order`: drops what is held for a model that is gone, and forgets what was
  // made of it: that says nothing about other rows. What is returned runs when the lock is free.
  // `rows_stay`: some of its rows are those of another model, too, and what was made is remembered.
  [[nodiscard]] std::function<void()> DropModel(uint64_t model_id, bool rows_stay = false);

 private:
  using Key = std::pair<std::string, uint64_t>;  // client, sequence
  // A mutation that is not finished.
  struct Vote {
    uint64_t model_id = 0;  // of the change that is, or was, held; 0: its rows are gone
    uint64_t history = 0;
    uint64_t tag = 0;
    uint64_t attempt = 0;          // in charge
    std::optional<Change> change;  // held
    bool making = false;           // on its way to the rows
    uint64_t fence = 0;            // its place in fenced_; 0: it has none
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
  std::map<uint64_t, Mutation> fenced_ ABSL_GUARDED_BY(order_->mutex);  // oldest first
  uint64_t last_fence_ ABSL_GUARDED_BY(order_->mutex) = 0;
  int64_t held_ ABSL_GUARDED_BY(order_->mutex) = 0;
  int64_t held_bytes_ ABSL_GUARDED_BY(order_->mutex) = 0;
};

// Where changes of a model's rows wait while a checkpoint's moment is fixed. Thread-safe. Must
// outlive its passes.
class ChangeGate {
 public:
  // Held by a change that has come in, until it is voted on or refused.
  using Pass = std::shared_ptr<const void>;
  using Go = std::function<void(Pass)>;

  // Calls `go` now, or when no pause holds the change back any more. `part`: of a group's step.
  void Enter(uint64_t model_id, const std::optional<internal::v1::GroupPart>& part, Go go);

  // See PauseChanges in shard_service.proto. Returns how many changes are in.
  absl::StatusOr<int> Pause(const internal::v1::PauseChangesRequest& request);
  void Resume(uint64_t model_id, uint64_t pause_id);
  // Whether the pause still holds back all changes, and none is in.
  bool Closed(uint64_t model_id, uint64_t pause_id);
  // Ends pauses that were not renewed.
  void Sweep(absl::Time now);

 private:
  struct Waiting {
    std::optional<internal::v1::GroupPart> part;
    Go go;
  };
  struct Gate {
    int entered = 0;
    uint64_t pause_id = 0;  // 0: open
    absl::Time until;
    std::string group;  // empty: of all changes
    int64_t after_step = 0;
    std::vector<Waiting> waiting;
  };

  static bool HoldsBack(const Gate& gate, const std::optional<internal::v1::GroupPart>& part);
  void Leave(uint64_t model_id);

  absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Gate> gates_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::host
