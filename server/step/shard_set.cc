#include "server/step/shard_set.h"

#include <algorithm>
#include <string>

#include "absl/time/clock.h"
#include "base/steady_time.h"

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
    if (context->cancelled()) return absl::CancelledError("the caller cancelled the call");
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

}  // namespace emberd::step
