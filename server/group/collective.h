// Where the members of a training group meet, as a coordinator sees it: through calls that block.
// What each call means and its errors: emberd/internal/v1/collective_service.proto.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/train.pb.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

struct GroupId {
  uint64_t model_id = 0;
  std::string group;

  auto operator<=>(const GroupId&) const = default;
};

struct Membership {
  uint64_t generation = 0;
  std::vector<std::string> coordinators;  // SYNC: by rank; otherwise empty
};

struct Gathered {
  std::vector<std::string> values;  // by rank
  std::vector<int64_t> arrival_us;  // by rank: microseconds after the first rank

  bool operator==(const Gathered&) const = default;
};

// Word of the end of a generation. Once the destructor has returned, `ended` runs no more.
class GenerationWatch {
 public:
  virtual ~GenerationWatch() = default;
};

// Thread-safe. Calls return when the answer is there, when the context's deadline has passed
// (DEADLINE_EXCEEDED) or when it is cancelled (CANCELLED), whatever comes first.
class Collective {
 public:
  virtual ~Collective() = default;

  // `coordinator` says who serves the member: one string per life of a coordinator process.
  virtual absl::StatusOr<Membership> Join(const GroupId& id, int rank,
                                          const v1::GroupOptions& options,
                                          const std::string& coordinator,
                                          rpc::CallContext* context) = 0;
  virtual absl::StatusOr<Gathered> AllGather(const GroupId& id, uint64_t generation, int rank,
                                             int group_key, int64_t instance_key, std::string value,
                                             rpc::CallContext* context) = 0;
  virtual absl::Status Advance(const GroupId& id, uint64_t generation, int rank, int64_t next_step,
                               int64_t wait_for, rpc::CallContext* context) = 0;
  // Best effort, under a short deadline of its own.
  virtual void Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
                     bool finished) = 0;

  // Calls `ended` once, with why the generation is over or why nobody can tell any more; never with
  // OK. May do so before it returns, and on any thread; `ended` must be short.
  virtual std::unique_ptr<GenerationWatch> Watch(const GroupId& id, uint64_t generation,
                                                 std::function<void(absl::Status)> ended) = 0;
};

}  // namespace emberd::server
