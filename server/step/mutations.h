// The updates and assignments of trainers, each made on all shards or on none, and once, whichever
// coordinator is asked how often. The shards vote and remember (server/host/mutation_votes.h);
// here is who asks them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/host/mutation_votes.h"
#include "server/rpc/call_context.h"
#include "server/step/shard_set.h"

namespace emberd::step {

struct MadeMutation {
  host::RowCounts rows;
  bool replayed = false;  // an earlier attempt had made it
};

// Thread-safe; what the constructor is given must outlive it.
class Mutations {
 public:
  // `shard_call`: how long shards may take for a word, and how old a vote must be before somebody
  // else than its coordinator decides on it.
  Mutations(const ShardSet& shards, absl::Duration shard_call)
      : shards_(shards), shard_call_(shard_call) {}

  // Calls try_once(attempt), which asks shards for their votes and commits. While that is ABORTED,
  // for another attempt is in charge: finds out what became of that one, and tries again if it made
  // nothing. UNAVAILABLE: it cannot be known yet, a retry will.
  absl::StatusOr<MadeMutation> Make(
      const host::Mutation& mutation, rpc::CallContext* context,
      const std::function<absl::StatusOr<MadeMutation>(uint64_t attempt)>& try_once);

  // The result of a mutation that some shard has made, or holds and is now told to make for another
  // has. Nothing: no shard has. Where one held it, none will by an attempt of before; where none
  // did, one that has not asked for votes yet still may. DATA_LOSS: a shard has lost what others
  // have made.
  absl::StatusOr<std::optional<host::RowCounts>> Find(const host::Mutation& mutation,
                                                      rpc::CallContext* context);

  // Says the word of `attempt` to a shard, again and again until it is heard, shard_call is over,
  // or the caller's deadline is near: a retry finds what has become of it.
  absl::StatusOr<host::RowCounts> Commit(int shard, const host::Mutation& mutation,
                                         uint64_t attempt, absl::Time deadline,
                                         const std::string& trace);
  // Best effort, under a deadline of its own: what is missed, a retry or SettleLeftovers finds.
  void Abandon(const host::Mutation& mutation, uint64_t attempt);

  // Decides on what shards hold and nobody has decided on for long.
  void SettleLeftovers();

 private:
  using Answers = std::vector<internal::v1::FindMutationResponse>;  // by shard

  absl::StatusOr<host::RowCounts> Decide(int shard, const host::Mutation& mutation,
                                         uint64_t attempt, bool commit, rpc::CallContext* context);
  // Asks all shards; every one must answer.
  absl::StatusOr<Answers> Ask(const host::Mutation& mutation, uint64_t attempt,
                              rpc::CallContext* context);
  // Takes charge on all shards with a larger attempt, which is returned in `attempt`; then as Find.
  absl::StatusOr<std::optional<host::RowCounts>> Settle(const host::Mutation& mutation,
                                                        const Answers& seen, uint64_t* attempt,
                                                        rpc::CallContext* context);

  const ShardSet& shards_;
  const absl::Duration shard_call_;
};

// Tells a shard to commit, again and again until it answers or `patience` is over.
absl::StatusOr<host::RowCounts> SayUntilHeard(
    absl::Duration patience, const std::string& trace,
    const std::function<absl::StatusOr<host::RowCounts>(rpc::CallContext* context)>& say);
// Whether the word to commit may not have reached a shard.
bool MayHaveMissed(const absl::Status& status);

}  // namespace emberd::step
