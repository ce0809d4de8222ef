#include "server/step/shard_set.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"

namespace emberd::step {
namespace {

constexpr absl::Duration kShortestPoll = absl::Milliseconds(1);
constexpr absl::Duration kLongestPoll = absl::Milliseconds(100);
constexpr double kPollShare = 0.03;  // of the time so far: by so much the end may be heard of late
constexpr absl::Duration kPollDeadline = absl::Seconds(5);
// A shard that does not hear of it gives up by itself what nobody asks about.
constexpr absl::Duration kCancelDeadline = absl::Milliseconds(500);
// A shard that cannot be reached for so long is taken for gone.
constexpr absl::Duration kUnreachablePatience = absl::Seconds(10);

using internal::v1::GetTransferResponse;

absl::Status ErrorOf(const GetTransferResponse& result) {
  if (result.state() != GetTransferResponse::FAILED) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(result.code()), result.error());
}

using internal::v1::FindMutationResponse;

constexpr absl::Duration kAbandonDeadline = absl::Seconds(1);
constexpr absl::Duration kWordPause = absl::Milliseconds(100);
constexpr absl::Duration kToAnswer = absl::Seconds(1);  // so that a caller hears why, in time
constexpr int kMaxTries = 3;
constexpr int kRandomBits = 10;

// Of two attempts, mostly the later one has the larger number; no two have the same. What is right
// does not depend on the clock, only who gives way.
uint64_t NewAttempt(uint64_t larger_than) {
  thread_local absl::BitGen generator;
  const auto now = static_cast<uint64_t>(absl::ToUnixMicros(absl::Now()));  // a date
  const uint64_t attempt = (std::max(now, (larger_than >> kRandomBits) + 1)) << kRandomBits;
  return attempt + absl::Uniform<uint64_t>(generator, 0, uint64_t{1} << kRandomBits);
}

// Another coordinator is at work on the same mutation: the trainer's next try finds the result.
absl::Status RetryLater(const absl::Status& status) {
  return absl::IsAborted(status) ? absl::UnavailableError(status.message()) : status;
}

}  // namespace

ShardTransfers::ShardTransfers(const ShardSet& shards) : shards_(shards), id_(rpc::RandomId()) {}

ShardTransfers::~ShardTransfers() {
  if (over_) return;
  internal::v1::CancelTransferRequest request;
  request.set_transfer_id(id_);
  rpc::CallContext context(SteadyNow() + kCancelDeadline);
  shards_.Ask(&host::ShardBackend::CancelTransfer, request, &context).IgnoreError();
}

absl::StatusOr<ShardTransfers::Results> ShardTransfers::Ask(rpc::CallContext* context) {
  internal::v1::GetTransferRequest request;
  request.set_transfer_id(id_);
  rpc::LinkedContext poll(context, kPollDeadline);
  Results results(shards_.size());
  RETURN_IF_ERROR(shards_.OnAll([&](int shard) -> absl::Status {
    auto result = shards_[shard].GetTransfer(request, poll.get());
    // Nothing of the model or its checkpoint is missing: whoever began it may begin it again.
    if (absl::IsNotFound(result.status())) return absl::AbortedError(result.status().message());
    ASSIGN_OR_RETURN(results[shard], std::move(result));
    return Annotate(ErrorOf(results[shard]), shards_[shard].name());
  }));
  return results;
}

absl::StatusOr<ShardTransfers::Results> ShardTransfers::Await(rpc::CallContext* context,
                                                              const BytesReport& report) {
  const absl::Time began = SteadyNow();
  absl::Time answered = began;
  while (true) {
    RETURN_IF_ERROR(context->CheckNotCancelled());
    // Of a caller by gRPC, the call is cancelled then; this one may be of the coordinator's own.
    if (SteadyNow() > context->deadline()) {
      return absl::DeadlineExceededError("the shards were not done when the deadline came");
    }
    absl::StatusOr<Results> results = Ask(context);
    const bool blip =
        absl::IsUnavailable(results.status()) || absl::IsDeadlineExceeded(results.status());
    if (!results.ok() && (!blip || SteadyNow() > answered + kUnreachablePatience)) return results;
    if (results.ok()) {
      answered = SteadyNow();
      int64_t bytes = 0, total = 0;
      for (const GetTransferResponse& result : *results) {
        bytes += result.bytes();
        total += result.total_bytes();
      }
      RETURN_IF_ERROR(report(bytes, total));
      const bool done = std::all_of(results->begin(), results->end(), [](const auto& result) {
        return result.state() == GetTransferResponse::DONE;
      });
      if (done) return results;
    }
    absl::SleepFor(std::clamp((SteadyNow() - began) * kPollShare, kShortestPoll, kLongestPoll));
  }
}

bool MayHaveMissed(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsUnknown(status) ||
         absl::IsDeadlineExceeded(status);
}

absl::StatusOr<MadeMutation> Mutations::Make(
    const host::Mutation& mutation, rpc::CallContext* context,
    const std::function<absl::StatusOr<MadeMutation>(uint64_t attempt)>& try_once) {
  uint64_t attempt = NewAttempt(0);
  for (int tries = 1;; ++tries) {
    absl::StatusOr<MadeMutation> made = try_once(attempt);
    if (!absl::IsAborted(made.status())) return made;
    if (tries == kMaxTries) return RetryLater(made.status());
    ASSIGN_OR_RETURN(const Answers seen, Ask(mutation, /*attempt=*/0, context));
    ASSIGN_OR_RETURN(const std::optional<host::RowCounts> before,
                     Settle(mutation, seen, &attempt, context));
    if (before.has_value()) return MadeMutation{*before, /*replayed=*/true};
    attempt = NewAttempt(attempt);  // a late word of now must not take back the votes to come
  }
}

absl::StatusOr<std::optional<host::RowCounts>> Mutations::Find(const host::Mutation& mutation,
                                                               rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const Answers seen, Ask(mutation, /*attempt=*/0, context));
  const bool unknown = std::all_of(seen.begin(), seen.end(), [](const auto& found) {
    return found.state() == FindMutationResponse::UNKNOWN;
  });
  if (unknown) return std::nullopt;
  uint64_t attempt = 0;
  return Settle(mutation, seen, &attempt, context);
}

absl::StatusOr<Mutations::Answers> Mutations::Ask(const host::Mutation& mutation, uint64_t attempt,
                                                  rpc::CallContext* context) {
  internal::v1::FindMutationRequest request;
  *request.mutable_mutation() = host::NameToProto(mutation);
  request.set_attempt(attempt);
  auto answers = shards_.Ask(&host::ShardBackend::FindMutation, request, context);
  if (!answers.ok()) return RetryLater(answers.status());
  return answers;
}

absl::StatusOr<std::optional<host::RowCounts>> Mutations::Settle(const host::Mutation& mutation,
                                                                 const Answers& seen,
                                                                 uint64_t* attempt,
                                                                 rpc::CallContext* context) {
  uint64_t in_charge = 0;
  for (const auto& found : seen) in_charge = std::max(in_charge, found.attempt());
  *attempt = NewAttempt(in_charge);
  rpc::LinkedContext settling(context, shard_call_);
  ASSIGN_OR_RETURN(const Answers now, Ask(mutation, *attempt, settling.get()));
  const bool made = std::any_of(now.begin(), now.end(), [](const auto& found) {
    return found.state() == FindMutationResponse::COMMITTED;
  });
  host::RowCounts rows;
  std::vector<int> holding;
  for (size_t i = 0; i < now.size(); ++i) {
    rows += host::RowCountsOf(now[i]);
    if (now[i].state() == FindMutationResponse::STAGED) holding.push_back(static_cast<int>(i));
    // The coordinator that took the votes commits only when all shards have voted: where one has
    // made the change, the others hold it.
    if (!made || now[i].state() != FindMutationResponse::UNKNOWN) continue;
    return absl::DataLossError(absl::StrCat(shards_[i].name(), " has lost mutation ",
                                            mutation.sequence, " of client '", mutation.client_id,
                                            "', which other shards have made"));
  }
  std::vector<host::RowCounts> decided(shards_.size());
  RETURN_IF_ERROR(shards_.On(holding, [&](int shard) {
    const auto result = Decide(shard, mutation, *attempt, made, settling.get());
    if (result.ok()) decided[shard] = *result;
    return RetryLater(result.status());
  }));
  if (!made) return std::nullopt;
  for (const host::RowCounts& more : decided) rows += more;
  return rows;
}

absl::StatusOr<host::RowCounts> Mutations::Decide(int shard, const host::Mutation& mutation,
                                                  uint64_t attempt, bool commit,
                                                  rpc::CallContext* context) {
  internal::v1::DecideMutationRequest request;
  *request.mutable_mutation() = host::NameToProto(mutation);
  request.set_attempt(attempt);
  request.set_commit(commit);
  ASSIGN_OR_RETURN(const auto decided, shards_[shard].DecideMutation(request, context));
  return host::RowCountsOf(decided);
}

absl::StatusOr<host::RowCounts> Mutations::Commit(int shard, const host::Mutation& mutation,
                                                  uint64_t attempt, absl::Time deadline,
                                                  const std::string& trace) {
  const absl::Duration left = std::max(deadline - SteadyNow() - kToAnswer, kToAnswer);
  return SayUntilHeard(std::min(left, shard_call_), trace, [&](rpc::CallContext* context) {
    return Decide(shard, mutation, attempt, /*commit=*/true, context);
  });
}

absl::StatusOr<host::RowCounts> SayUntilHeard(
    absl::Duration patience, const std::string& trace,
    const std::function<absl::StatusOr<host::RowCounts>(rpc::CallContext* context)>& say) {
  rpc::CallContext context(SteadyNow() + patience, trace);
  while (true) {
    auto rows = say(&context);
    if (!MayHaveMissed(rows.status()) || SteadyNow() + kWordPause > context.deadline()) {
      return rows;
    }
    absl::SleepFor(kWordPause);
  }
}

void Mutations::Abandon(const host::Mutation& mutation, uint64_t attempt) {
  rpc::CallContext context(SteadyNow() + kAbandonDeadline);
  shards_
      .OnAll([&](int shard) {
        return Decide(shard, mutation, attempt, /*commit=*/false, &context).status();
      })
      .IgnoreError();
}

void Mutations::SettleLeftovers() {
  rpc::CallContext context(SteadyNow() + kAbandonDeadline);
  internal::v1::ListUndecidedRequest request;
  request.set_older_than_ms(absl::ToInt64Milliseconds(shard_call_));
  // Without all shards, nobody could decide.
  const auto listed = shards_.Ask(&host::ShardBackend::ListUndecided, request, &context);
  if (!listed.ok()) return;
  const auto less = [](const host::Mutation& a, const host::Mutation& b) {
    return std::tie(a.client_id, a.sequence) < std::tie(b.client_id, b.sequence);
  };
  std::set<host::Mutation, decltype(less)> mutations(less);
  for (const internal::v1::ListUndecidedResponse& of_shard : *listed) {
    for (const internal::v1::MutationName& name : of_shard.mutations()) {
      if (const auto mutation = host::MutationOf(name); mutation.ok()) mutations.insert(*mutation);
    }
  }
  for (const host::Mutation& mutation : mutations) {
    rpc::CallContext settling(SteadyNow() + kAbandonDeadline);
    const auto made = Find(mutation, &settling);
    if (absl::IsFailedPrecondition(made.status()) || absl::IsDataLoss(made.status())) {
      static ops::RateLimitedLog log(absl::Minutes(1));
      log.Log(ops::LogLevel::kError, "an update can never be decided; reset or restore its model",
              {{"reason", made.status()}});
    }
    if (!made.ok()) continue;  // or a shard is out of reach, or another coordinator is at it
    ops::Log(ops::LogLevel::kInfo, "decided on an update whose coordinator went away",
             {{"client", mutation.client_id},
              {"sequence", mutation.sequence},
              {"made", made->has_value()}});
  }
}

}  // namespace emberd::step
