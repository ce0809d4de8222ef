// The control verbs of a shard: unary rpcs of ShardService, whose proto says what each does. Here
// stands all that is to be known of a verb but its work, which ShardVerbs does: a new one is an rpc
// there, a line here, and a function, or a line, in verbs.cc.
#pragma once

#include <functional>

#include <google/protobuf/message.h>

#include "absl/status/status.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "server/rpc/call_context.h"

namespace emberd::group {
class Rendezvous;
}  // namespace emberd::group

namespace emberd::host {

class ShardHost;

// Where the work of a verb runs, when it comes by gRPC.
enum class VerbRuns {
  kAtOnce,   // on a thread of gRPC: it does not wait for long
  kInTurn,   // one after another: filling tables takes a while
  kIfHeard,  // in turn, unless the caller is gone by then: nobody would know of the rows
  kOfFiles,  // a few at a time: the disk may take a while
  kMeets,    // at once, also while the shard recovers; may wait for other ranks
  kApart,  // also while the shard recovers, and apart from those in turn: the caller waits briefly
};

// VERB(name, request, response, VerbRuns) of each. First those of the host.
#define EMBERD_HOST_VERBS(VERB)                                                                    \
  EMBERD_OWN_VERB(VERB, CreateModel, kIfHeard)                                                     \
  EMBERD_OWN_VERB(VERB, FindModel, kAtOnce)                                                        \
  EMBERD_OWN_VERB(VERB, ServeModel, kAtOnce)                                                       \
  EMBERD_OWN_VERB(VERB, ListModels, kAtOnce)                                                       \
  EMBERD_OWN_VERB(VERB, DropModel, kInTurn)                                                        \
  EMBERD_OWN_VERB(VERB, OpenGroup, kAtOnce)                                                        \
  EMBERD_OWN_VERB(VERB, DecideStep, kAtOnce)                                                       \
  EMBERD_OWN_VERB(VERB, DropGroups, kAtOnce)                                                       \
  EMBERD_OWN_VERB(VERB, ReleaseBatch, kAtOnce)                                                     \
  EMBERD_OWN_VERB(VERB, RenewBatches, kAtOnce)                                                     \
  EMBERD_OWN_VERB(VERB, FindMutation, kAtOnce)                                                     \
  EMBERD_OWN_VERB(VERB, DecideMutation, kAtOnce)                                                   \
  EMBERD_OWN_VERB(VERB, ListUndecided, kAtOnce)                                                    \
  EMBERD_OWN_VERB(VERB, ListMade, kAtOnce)                                                         \
  EMBERD_OWN_VERB(VERB, PauseChanges, kAtOnce)                                                     \
  EMBERD_OWN_VERB(VERB, ResumeChanges, kAtOnce)                                                    \
  EMBERD_OWN_VERB(VERB, BeginSave, kAtOnce)                                                        \
  EMBERD_OWN_VERB(VERB, CompleteSave, kOfFiles)                                                    \
  EMBERD_OWN_VERB(VERB, BeginRestore, kIfHeard)                                                    \
  EMBERD_OWN_VERB(VERB, GetTransfer, kAtOnce)                                                      \
  EMBERD_OWN_VERB(VERB, CancelTransfer, kOfFiles)                                                  \
  VERB(ReadRows, internal::v1::ReadShardRowsRequest, internal::v1::ReadShardRowsResponse, kAtOnce) \
  VERB(AssignRows, internal::v1::AssignShardRowsRequest, internal::v1::AssignShardRowsResponse,    \
       kAtOnce)                                                                                    \
  VERB(GetStatus, internal::v1::GetShardStatusRequest, v1::ShardStatus, kApart)                    \
  VERB(ChangeMemory, v1::ChangeMemoryRequest, v1::ShardMemoryChange, kInTurn)
// Those by which the ranks of a group meet: functions of Rendezvous.
#define EMBERD_GROUP_VERBS(VERB)           \
  EMBERD_OWN_VERB(VERB, Join, kMeets)      \
  EMBERD_OWN_VERB(VERB, AllGather, kMeets) \
  EMBERD_OWN_VERB(VERB, Advance, kMeets)   \
  EMBERD_OWN_VERB(VERB, Leave, kMeets)     \
  EMBERD_OWN_VERB(VERB, Watch, kMeets)
#define EMBERD_SHARD_VERBS(VERB) EMBERD_HOST_VERBS(VERB) EMBERD_GROUP_VERBS(VERB)
#define EMBERD_OWN_VERB(VERB, name, runs) \
  VERB(name, internal::v1::name##Request, internal::v1::name##Response, runs)

enum class ShardVerb {
#define EMBERD_VERB(name, request, response, runs) k##name,
  EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB
};

const char* NameOf(ShardVerb verb);  // "CreateModel"
VerbRuns RunsOf(ShardVerb verb);
// An error that names the group: its ranks hear the same wherever they meet, without a shard's
// name.
bool IsOfGroup(ShardVerb verb, const absl::Status& status);

// What verbs do, wherever they come from. Thread-safe.
class ShardVerbs {
 public:
  // Both must outlive it. Without a host, it does no more than the verbs of groups.
  ShardVerbs(ShardHost* host, group::Rendezvous* rendezvous)
      : host_(host), rendezvous_(rendezvous) {}

  // Called once, from any thread.
  using Done = std::function<void(const absl::Status& status)>;
  // The messages are of the verb's types, and stay where they are until `done` is called; the
  // response is there then, if the status is OK. The result withdraws a call that may wait
  // (group::Withdraw), or is null.
  using Withdraw = std::function<void(const absl::Status& why)>;
  Withdraw Run(ShardVerb verb, const google::protobuf::Message& request,
               google::protobuf::Message* response, Done done);
  // The same, and waits: where others are waited for, as long as `context` allows.
  absl::Status Call(ShardVerb verb, const google::protobuf::Message& request,
                    google::protobuf::Message* response, rpc::CallContext* context);

 private:
#define EMBERD_VERB(name, request_type, response_type, runs) \
  void name(const request_type& request, response_type* response, Done done);
  EMBERD_HOST_VERBS(EMBERD_VERB)
#undef EMBERD_VERB

  ShardHost* const host_;
  group::Rendezvous* const rendezvous_;
};

}  // namespace emberd::host
