#include "server/host/verbs.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "server/group/rendezvous.h"
#include "server/host/mutation_votes.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_codec.h"
#include "server/host/shard_host.h"
#include "server/rpc/budgets.h"

namespace emberd::host {
namespace {

namespace pb = internal::v1;

absl::Status Fill(const absl::Status& result, google::protobuf::Message*) { return result; }
template <typename Response>
absl::Status Fill(absl::StatusOr<Response> result, Response* response) {
  RETURN_IF_ERROR(result.status());
  *response = *std::move(result);
  return absl::OkStatus();
}

// For what answers with counts of rows.
template <typename Response>
auto FillCounts(Response* response, ShardVerbs::Done done) {
  return [response, done = std::move(done)](const absl::StatusOr<RowCounts>& rows) {
    if (rows.ok()) SetRowCounts(*rows, response);
    done(rows.status());
  };
}

// FAILED_PRECONDITION, and nothing is forgotten, also where ranks are at work in one of the groups,
// as far as `rendezvous` knows. "NAME#" is no group: it asks for nothing but this of NAME.
absl::StatusOr<pb::DropGroupsResponse> ForgetGroups(ShardHost* host, group::Rendezvous* rendezvous,
                                                    const pb::DropGroupsRequest& request) {
  std::set<std::string> names;
  for (const std::string& group : request.groups()) names.insert(group.substr(0, group.find('#')));
  for (const std::string& name : names) {
    RETURN_IF_ERROR(rendezvous->Forget({request.model_id(), name}));
  }
  return host->DropGroups(request);
}

// Both: INVALID_ARGUMENT names what is wrong, RESOURCE_EXHAUSTED what there is no room for.

// With room for the values, too.
absl::StatusOr<std::shared_ptr<NamedRows>> RowsToRead(const pb::ReadShardRowsRequest& request,
                                                      const rpc::MessageLimits& limits) {
  auto rows = std::make_shared<NamedRows>();
  RETURN_IF_ERROR(DecodeRead(request, rows.get()));
  const size_t bytes = rows->floats() * sizeof(float);
  if (bytes > static_cast<size_t>(limits.max_bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("the rows asked for have ", bytes,
                                                     " bytes; budgets.max_message_bytes is ",
                                                     limits.max_bytes));
  }
  // Where they lie, the rows, and the message that is made of them.
  const size_t places = request.partitions().size() + request.local_rows().size();
  ASSIGN_OR_RETURN(rows->room,
                   limits.memory.Take(static_cast<int64_t>(places + 2 * bytes), "the answer"));
  rows->values.resize(rows->floats());
  return rows;
}

absl::StatusOr<AssignCommand> RowsToAssign(const pb::AssignShardRowsRequest& request,
                                           const rpc::MessageLimits& limits) {
  ASSIGN_OR_RETURN(const Mutation mutation, MutationOf(request.mutation()));
  RETURN_IF_ERROR(CheckAttempt(request.attempt()));
  ASSIGN_OR_RETURN(rpc::MemoryRoom room,
                   limits.memory.Take(static_cast<int64_t>(request.values().size()), "a request"));
  ASSIGN_OR_RETURN(AssignCommand command, DecodeAssign(request, std::move(room)));
  command.mutation = mutation;
  command.attempt = request.attempt();
  return command;
}

}  // namespace

const char* NameOf(ShardVerb verb) {
  static constexpr const char* kNames[] = {
#define EMBERD_VERB(name, request, response, runs) #name,
      EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB
  };
  return kNames[static_cast<size_t>(verb)];
}

VerbRuns RunsOf(ShardVerb verb) {
  static constexpr VerbRuns kRuns[] = {
#define EMBERD_VERB(name, request, response, runs) VerbRuns::runs,
      EMBERD_SHARD_VERBS(EMBERD_VERB)
#undef EMBERD_VERB
  };
  return kRuns[static_cast<size_t>(verb)];
}

bool IsOfGroup(ShardVerb verb, const absl::Status& status) {
  return RunsOf(verb) == VerbRuns::kMeets && absl::StartsWith(status.message(), "group ");
}

ShardVerbs::Withdraw ShardVerbs::Run(ShardVerb verb, const google::protobuf::Message& request,
                                     google::protobuf::Message* response, Done done) {
  switch (verb) {
#define EMBERD_VERB(name, request_type, response_type, runs)                               \
  case ShardVerb::k##name:                                                                 \
    name(static_cast<const request_type&>(request), static_cast<response_type*>(response), \
         std::move(done));                                                                 \
    break;
    EMBERD_HOST_VERBS(EMBERD_VERB)
#undef EMBERD_VERB
#define EMBERD_VERB(name, request_type, response_type, runs)                           \
  case ShardVerb::k##name:                                                             \
    return rendezvous_->name(static_cast<const request_type&>(request),                \
                             [done, response = static_cast<response_type*>(response)]( \
                                 auto result) { done(Fill(std::move(result), response)); });
    EMBERD_GROUP_VERBS(EMBERD_VERB)
#undef EMBERD_VERB
  }
  return nullptr;
}

absl::Status ShardVerbs::Call(ShardVerb verb, const google::protobuf::Message& request,
                              google::protobuf::Message* response, rpc::CallContext* context) {
  rpc::Promise<absl::Status> answer;
  const Withdraw withdraw = Run(verb, request, response, answer.Setter());
  if (withdraw == nullptr) return answer.Wait();
  const rpc::CancelWatch watch(context, [&withdraw] {
    withdraw(absl::CancelledError("the caller cancelled the call while it waited for other ranks"));
  });
  if (!answer.WaitUntil(context->deadline())) {
    withdraw(absl::DeadlineExceededError(
        "the caller's deadline passed while it waited for other ranks"));
  }
  return answer.Wait();
}

// Verbs that are one function of the host, or of its checkpoints.
#define EMBERD_FORWARD(whose, name)                                                     \
  void ShardVerbs::name(const pb::name##Request& request, pb::name##Response* response, \
                        Done done) {                                                    \
    done(Fill(whose.name(request), response));                                          \
  }
EMBERD_FORWARD((*host_), CreateModel)
EMBERD_FORWARD((*host_), FindModel)
EMBERD_FORWARD((*host_), ServeModel)
EMBERD_FORWARD((*host_), DropModel)
EMBERD_FORWARD((*host_), OpenGroup)
EMBERD_FORWARD((*host_), ListMade)
EMBERD_FORWARD(host_->checkpoints(), PauseChanges)
EMBERD_FORWARD(host_->checkpoints(), ResumeChanges)
EMBERD_FORWARD(host_->checkpoints(), BeginSave)
EMBERD_FORWARD(host_->checkpoints(), CompleteSave)
EMBERD_FORWARD(host_->checkpoints(), BeginRestore)
EMBERD_FORWARD(host_->checkpoints(), GetTransfer)
EMBERD_FORWARD(host_->checkpoints(), CancelTransfer)
#undef EMBERD_FORWARD

void ShardVerbs::ListModels(const pb::ListModelsRequest&, pb::ListModelsResponse* response,
                            Done done) {
  *response = host_->ListModels();
  done(absl::OkStatus());
}

void ShardVerbs::ChangeMemory(const v1::ChangeMemoryRequest& request,
                              v1::ShardMemoryChange* response, Done done) {
  done(Fill(host_->ChangeMemory(request), response));
}

void ShardVerbs::DecideStep(const pb::DecideStepRequest& request, pb::DecideStepResponse* response,
                            Done done) {
  host_->DecideStep(request, FillCounts(response, std::move(done)));
}

void ShardVerbs::DropGroups(const pb::DropGroupsRequest& request, pb::DropGroupsResponse* response,
                            Done done) {
  done(Fill(ForgetGroups(host_, rendezvous_, request), response));
}

void ShardVerbs::ReleaseBatch(const pb::ReleaseBatchRequest& request, pb::ReleaseBatchResponse*,
                              Done done) {
  done(host_->ReleaseBatch(request.model_id(), request.batch_handle()));
}

void ShardVerbs::RenewBatches(const pb::RenewBatchesRequest& request, pb::RenewBatchesResponse*,
                              Done done) {
  for (const uint64_t handle : request.batch_handles()) {
    host_->RenewBatch(handle, absl::Milliseconds(request.batch_ttl_ms()));
  }
  done(absl::OkStatus());
}

void ShardVerbs::FindMutation(const pb::FindMutationRequest& request,
                              pb::FindMutationResponse* response, Done done) {
  const absl::StatusOr<Mutation> mutation = MutationOf(request.mutation());
  if (!mutation.ok()) return done(mutation.status());
  host_->FindMutation(
      *mutation, request.attempt(),
      [response, done = std::move(done)](const absl::StatusOr<MutationVotes::Found>& found) {
        if (found.ok()) {
          response->set_state(found->state);
          response->set_attempt(found->attempt);
          SetRowCounts(found->rows, response);
        }
        done(found.status());
      });
}

void ShardVerbs::DecideMutation(const pb::DecideMutationRequest& request,
                                pb::DecideMutationResponse* response, Done done) {
  const absl::StatusOr<Mutation> mutation = MutationOf(request.mutation());
  if (!mutation.ok()) return done(mutation.status());
  host_->DecideMutation(*mutation, request.attempt(), request.commit(),
                        FillCounts(response, std::move(done)));
}

void ShardVerbs::ListUndecided(const pb::ListUndecidedRequest& request,
                               pb::ListUndecidedResponse* response, Done done) {
  for (const Mutation& mutation : host_->Undecided(absl::Milliseconds(request.older_than_ms()))) {
    *response->add_mutations() = NameToProto(mutation);
  }
  done(absl::OkStatus());
}

void ShardVerbs::ReadRows(const pb::ReadShardRowsRequest& request,
                          pb::ReadShardRowsResponse* response, Done done) {
  const auto read = RowsToRead(request, host_->limits());
  if (!read.ok()) return done(read.status());
  host_->ReadRows((*read)->selection, absl::MakeSpan((*read)->values),
                  [rows = *read, response, done = std::move(done)](const absl::Status& status) {
                    const size_t bytes = rows->values.size() * sizeof(float);
                    if (status.ok()) response->set_values(rows->values.data(), bytes);
                    done(status);
                  });
}

void ShardVerbs::AssignRows(const pb::AssignShardRowsRequest& request,
                            pb::AssignShardRowsResponse* response, Done done) {
  absl::StatusOr<AssignCommand> command = RowsToAssign(request, host_->limits());
  if (!command.ok()) return done(command.status());
  host_->StageAssign(*std::move(command), [response, done = std::move(done)](const auto& replayed) {
    if (replayed.ok()) response->set_replayed(*replayed);
    done(replayed.status());
  });
}

void ShardVerbs::GetStatus(const pb::GetShardStatusRequest& request, v1::ShardStatus* response,
                           Done done) {
  const absl::Status status = CheckHotRows(request.hot_rows());
  if (status.ok()) *response = host_->GetStatus(request.hot_rows());
  done(status);
}

}  // namespace emberd::host
