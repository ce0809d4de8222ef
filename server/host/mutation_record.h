// Remembers which state-changing requests were carried out, so that a retry is answered and not
// applied again.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"

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

struct MutationRecordOptions {
  // The newest finished requests kept of one client. Older sequence numbers are refused, never
  // applied again.
  int per_client = 1024;
  // Those that are younger are kept beyond that, while a quarter of `entries` is free: a shard may
  // hold a vote of then, and who decides on it has to know whether the change was made here.
  absl::Duration young = absl::ZeroDuration();
  // Clients, and requests of all clients together: beyond either, the client that was quiet for
  // longest is forgotten; beyond half of `entries`, if it has none that is young.
  int clients = 65536;
  int entries = 1 << 20;
  // Forgotten clients of whom one number is still known: what they asked for up to it is refused.
  int forgotten_clients = 1 << 20;
};

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

  // What was carried out on a model, for checkpoints; and that put in the place of what is known.
  // What a client was told to be too old stays so.
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
  void NoteForgotten(const std::string& client_id, uint64_t highest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const MutationRecordOptions options_;
  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Client> clients_ ABSL_GUARDED_BY(mutex_);
  std::list<std::string> recency_ ABSL_GUARDED_BY(mutex_);  // most recent first
  int entries_ ABSL_GUARDED_BY(mutex_) = 0;                 // of all clients
  // By hash of a forgotten client's name: its highest number.
  absl::flat_hash_map<size_t, uint64_t> forgotten_ ABSL_GUARDED_BY(mutex_);
  std::deque<size_t> forgotten_order_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

// Tags have the id of the model that the changes were made on as its last XOR: it has another id if
// its config is another one now.
void NameModel(uint64_t before, uint64_t now, MutationRecord::Clients* clients);

}  // namespace emberd::host
