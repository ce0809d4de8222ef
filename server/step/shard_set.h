// The shards of a cluster, asked all at once: for answers (ShardSet), for work until all have done
// it (ShardTransfers), and for the updates and assignments of trainers, each made on all of them or
// on none, and once, whichever coordinator is asked how often (Mutations). Of these the shards vote
// and remember (server/host/mutation_votes.h); here is who asks them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/host/mutation_votes.h"
#include "server/host/shard_backend.h"
#include "server/rpc/call_context.h"

namespace emberd::step {

// Immutable. Calls wait for all answers, also where one of them is an error: the first one, by the
// order of the shards, is the result. Threads of their own: these calls are rare (declarations, row
// access) and block on the network.
class ShardSet {
 public:
  // `threads` must outlive it.
  ShardSet(std::vector<std::shared_ptr<host::ShardBackend>> shards, BlockingPool* threads)
      : shards_(std::move(shards)), threads_(threads) {}

  size_t size() const { return shards_.size(); }
  host::ShardBackend& operator[](size_t shard) const { return *shards_[shard]; }
  // first, ..., size() - 1.
  std::vector<int> From(int first) const {
    std::vector<int> shards(shards_.size() - first);
    std::iota(shards.begin(), shards.end(), first);
    return shards;
  }

  // Runs call(i) for every i in `shards` in parallel.
  template <typename Call>
  absl::Status On(const std::vector<int>& shards, const Call& call) const {
    std::vector<absl::Status> statuses(shards.size());
    threads_->RunEach(static_cast<int>(shards.size()),
                      [&](int i) { statuses[i] = call(shards[i]); });
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }
  template <typename Call>
  absl::Status OnAll(const Call& call) const {
    return On(From(0), call);
  }
  // On shard 0, and then on all others.
  template <typename Call>
  absl::Status OnAllFirstZero(const Call& call) const {
    RETURN_IF_ERROR(call(0));
    return On(From(1), call);
  }

  // A control verb, to all: answer i is shard i's.
  template <typename Request, typename Response>
  using Verb = absl::StatusOr<Response> (host::ShardBackend::*)(const Request&, rpc::CallContext*);
  template <typename Request, typename Response>
  absl::StatusOr<std::vector<Response>> Ask(Verb<Request, Response> verb, const Request& request,
                                            rpc::CallContext* context) const {
    std::vector<Response> answers(shards_.size());
    RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      ASSIGN_OR_RETURN(answers[shard], ((*shards_[shard]).*verb)(request, context));
      return absl::OkStatus();
    }));
    return answers;
  }

 private:
  const std::vector<std::shared_ptr<host::ShardBackend>> shards_;
  BlockingPool* const threads_;
};

// A request about a model's rows of this history.
template <typename Request>
Request OfRows(uint64_t model_id, uint64_t history) {
  Request request;
  request.set_model_id(model_id);
  request.set_history(history);
  return request;
}

// A save or restore that runs on all shards, as seen by the coordinator that began it.

// Hears, now and then, how far all shards are together. An error ends the work.
using BytesReport = std::function<absl::Status(int64_t bytes, int64_t total_bytes)>;

// Not thread-safe. Its destructor makes the shards give up what is not over.
class ShardTransfers {
 public:
  using Results = std::vector<internal::v1::GetTransferResponse>;  // by shard

  // `shards` must outlive it.
  explicit ShardTransfers(const ShardSet& shards);
  ~ShardTransfers();
  ShardTransfers(const ShardTransfers&) = delete;
  ShardTransfers& operator=(const ShardTransfers&) = delete;

  // What the shards know it by.
  uint64_t id() const { return id_; }

  // Blocks until all shards are done, or one of them has failed. CANCELLED and DEADLINE_EXCEEDED
  // with the context. ABORTED if a shard does not know it any more, as after a restart.
  absl::StatusOr<Results> Await(rpc::CallContext* context, const BytesReport& report);
  // The shards may forget it.
  void Keep() { over_ = true; }

 private:
  absl::StatusOr<Results> Ask(rpc::CallContext* context);

  const ShardSet& shards_;
  const uint64_t id_;
  bool over_ = false;
};

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

  // The result of a mutation that some shard has made; those that only hold it are told to make it.
  // Nothing: no shard has made it. If one held it, no earlier attempt can make it any more; if none
  // did, an attempt that has not asked for votes yet still may. DATA_LOSS: a shard has lost what
  // others have made.
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
