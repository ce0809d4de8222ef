// A shard as a coordinator sees it, wherever it runs: in this process or behind gRPC.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/regions.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "preprocess/batch/csr.h"
#include "server/host/mutation_votes.h"
#include "server/host/verbs.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/rpc/message.h"
#include "server/security/security.h"
#include "shard/gather/pooling.h"
#include "shard/store/model.h"
#include "shard/update/update.h"

namespace emberd::host {

// What Gather asks of one shard.
struct GatherCommand {
  uint64_t model_id = 0;
  uint64_t history = 0;       // of the rows
  uint64_t batch_handle = 0;  // 0: nothing is kept
  absl::Duration batch_ttl;
  std::vector<preprocess::StackBatchView> stacks;
  std::shared_ptr<const void> owner;  // keeps the views alive
  int64_t answer_bytes = 0;           // at most so many come back; 0: not known
  v1::SharedBlock answer;             // where the shard may write them; of size 0: nowhere
  v1::DataType activation_dtype = v1::FLOAT32;  // to what activations will be rounded
  // Where it writes sums, in memory of `region`, which it was lent. A shard that has lost it
  // returns them.
  shard::GatherPlaces places = {};
  NamedRegion region = {};
};

// Bytes of what a Gather sends to the shard.
inline int64_t PayloadBytes(const GatherCommand& command) {
  size_t bytes = 0;
  for (const preprocess::StackBatchView& stack : command.stacks) {
    bytes += stack.cells() * (2 * sizeof(int32_t) + sizeof(float));
    for (const auto& segment : stack.segments) bytes += segment.row_ends.size() * sizeof(int32_t);
  }
  return static_cast<int64_t>(bytes);
}

// A stack stands in one of the two, by ascending index.
struct GatherResult {
  uint64_t history = 0;
  std::vector<shard::StackSums> stacks;
  std::vector<shard::StackRows> rows;
  std::shared_ptr<const void> owner;  // keeps them alive
  shard::GatherPlaces places = {};    // those that the shard was asked for

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const shard::StackSums& stack : stacks) bytes += stack.bytes();
    for (const shard::StackRows& stack : rows) bytes += stack.bytes();
    return bytes;
  }
};

// Makes an update one rank's part of a step of a group. Instead of its `skip`, ApplyInput's counts.
using internal::v1::GroupPart;
struct ApplyCommand {
  uint64_t model_id = 0;
  uint64_t batch_handle = 0;
  uint64_t history = 0;  // of the rows that the batch was gathered from
  Mutation mutation;     // this and `attempt` are not used with a group_part
  uint64_t attempt = 0;  // see MutationVotes
  std::optional<GroupPart> group_part;
  shard::ApplyInput input;
  int64_t payload_bytes = 0;  // of the message that brought it
  // ShardBackend::TakeBlock's, which holds the gradients of `input`, stack after stack from its
  // begin; null: they lie elsewhere.
  std::shared_ptr<SharedBlock> block;
  // Where gradients lie that `input` names by place: regions that the shard was lent. If it has
  // lost one, it is sent `copied` instead, which must be there as long as the call.
  std::vector<NamedRegion> regions = {};
  std::function<ApplyCommand()> copied = nullptr;
};
// The answer to an ApplyCommand that nothing was found wrong with.
struct StageOutcome {
  bool replayed = false;  // applied before: there is nothing to decide
  RowCounts rows;
};

struct AssignCommand {
  shard::RowSelection rows;
  absl::Span<const float> values;     // [rows, rows.columns]
  std::shared_ptr<const void> owner;  // keeps the views alive
  Mutation mutation;
  uint64_t attempt = 0;
};

// A Gather under way. The destructor cancels it.
class GatherCall {
 public:
  virtual ~GatherCall() = default;
  virtual absl::StatusOr<GatherResult> Wait() = 0;
};

// An Apply under way: staged first, then committed or discarded as the coordinator decides. What is
// staged stays so if the call goes away undecided.
class ApplyCall {
 public:
  virtual ~ApplyCall() = default;
  virtual absl::StatusOr<StageOutcome> WaitStaged() = 0;
  // Only after WaitStaged returned OK and not replayed.
  virtual void Decide(bool commit) = 0;
  // Only after Decide.
  virtual absl::StatusOr<RowCounts> WaitDone() = 0;
};

// How many hot rows of each table a caller may ask for.
inline constexpr int kMaxHotRows = 100;
absl::Status CheckHotRows(int hot_rows);
// INVALID_ARGUMENT names what an AdminService.ChangeMemory lacks.
absl::Status CheckMemoryChange(const v1::ChangeMemoryRequest& request);

// Thread-safe. Every error's message begins with the shard's name, or with that of a group
// (IsOfGroup).
class ShardBackend {
 public:
  virtual ~ShardBackend() = default;

  virtual const std::string& name() const = 0;     // "shard 2"
  virtual const std::string& address() const = 0;  // "127.0.0.1:7002", or "in-process"

  // The control verbs, by name: see shard_service.proto.
#define EMBERD_VERB(name, request_type, response_type, runs)                                   \
  absl::StatusOr<response_type> name(const request_type& request, rpc::CallContext* context) { \
    response_type response;                                                                    \
    absl::Status status = Control(ShardVerb::k##name, request, &response, context);            \
    if (!status.ok()) return status;                                                           \
    return response;                                                                           \
  }
  EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB

  // `context` must outlive the call.
  virtual std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext* context) = 0;
  // Whether the shard can read and write in place in a region of a client's, from now on and as
  // long as somebody here refers to it. False, too, if it does not answer until `deadline`.
  virtual bool Lend(const NamedRegion& region, absl::Time deadline) { return false; }
  // Takes back what nobody refers to any more. To be called often.
  virtual void TakeBackRegions() {}
  // Memory for the gradients of one Apply, which the shard reads where they are. Null: any other
  // will do. By a deadline, as Lend.
  virtual std::shared_ptr<SharedBlock> TakeBlock(int64_t bytes, absl::Time) { return nullptr; }
  virtual std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext* context) = 0;

 protected:
  // The messages are of the verb's types.
  virtual absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                               google::protobuf::Message* response, rpc::CallContext* context) = 0;
};

// A shard in this process: calls go straight to a ShardHost, with no copy and no network. `cluster`
// is complete (config::CompleteCluster). `metrics` and `threads` must outlive the shard. Waits
// until the shard has read its log; CANCELLED once `stopped` says so.
absl::StatusOr<std::shared_ptr<ShardBackend>> MakeLocalShard(
    const v1::ClusterConfig& cluster, int shard_index, ops::Metrics* metrics, ThreadPools* threads,
    const std::function<bool()>& stopped = [] { return false; });

struct RemoteShardOptions {
  int index = 0;
  std::string address;        // "host:port"
  rpc::MessageLimits limits;  // of its answers
  // Sent with each call. A shard refuses calls that are meant for another one.
  internal::v1::ShardPlace place = {};
  // How to connect; null: in plain text, without a token.
  std::shared_ptr<const security::Security> security = nullptr;
  // Payloads of at least so many bytes lie in memory that both ends have, if they are on one
  // machine; 0: all are sent.
  int64_t share_from_bytes = 0;
  // Whether small gathers go without gRPC then.
  bool lanes = false;
};

// A shard in another process, behind gRPC. Does not wait for it to be there: calls fail with
// UNAVAILABLE until it is, and find it again after a restart.
std::shared_ptr<ShardBackend> MakeRemoteShard(RemoteShardOptions options);

}  // namespace emberd::host
