// The shards of a cluster, asked all at once; and work that they all do, until all have done it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
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

}  // namespace emberd::step
