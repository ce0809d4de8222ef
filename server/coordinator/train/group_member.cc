#include "server/coordinator/train/group_member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/group/group_rules.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::server {
namespace {

constexpr int64_t kDefaultTimeoutMs = 60'000;
// Beyond the members' own timeout, for the way to the host of the group and back.
constexpr absl::Duration kExchangeMargin = absl::Seconds(5);

// Exchanges of a step.
constexpr int kFindStep = 1;
constexpr int kNeedCuts = 2;
constexpr int kCuts = 3;
constexpr int kStaged = 4;

// What a trainer may say about its group, after the defaults.
absl::Status CheckStart(const v1::TrainStart& start) {
  const v1::GroupOptions& options = start.options();
  RETURN_IF_ERROR(CheckGroupName("group", start.group()));
  RETURN_IF_ERROR(CheckGroupOptions(options));
  RETURN_IF_ERROR(CheckRank(start.rank(), options.size()));
  if (options.consistency() != v1::BOUNDED) {
    RETURN_IF_ERROR(CheckInRange("options.staleness_bound", options.staleness_bound(), 0, 0));
  }
  if (options.consistency() != v1::SYNC && options.pipelined()) {
    return absl::InvalidArgumentError("options.pipelined is true; only a SYNC group may be");
  }
  return absl::OkStatus();
}

// A request to the host of the group.
template <typename Request>
Request OfRank(const ServedModel& model, const v1::TrainStart& start) {
  Request request;
  request.mutable_name()->set_model_id(model.id);
  request.mutable_name()->set_group(start.group());
  request.set_rank(start.rank());
  return request;
}

std::string PackInt(uint64_t value) { return absl::StrCat(value); }

absl::StatusOr<uint64_t> UnpackInt(const std::string& bytes) {
  uint64_t value = 0;
  if (absl::SimpleAtoi(bytes, &value)) return value;
  return absl::InternalError(absl::StrCat("another rank sent '", absl::CHexEscape(bytes),
                                          "' in an exchange; it must be a whole number"));
}

}  // namespace

absl::Status CompleteTrainStart(v1::TrainStart* start) {
  v1::GroupOptions& options = *start->mutable_options();
  if (options.size() == 0) options.set_size(1);
  if (options.consistency() == v1::CONSISTENCY_UNSPECIFIED) options.set_consistency(v1::SYNC);
  if (options.step_timeout_ms() == 0) options.set_step_timeout_ms(kDefaultTimeoutMs);
  const absl::Status status = CheckStart(*start);
  return absl::Status(status.code(), status.ok() ? "" : absl::StrCat("start.", status.message()));
}

GroupMember::GroupMember(const Environment& environment, std::shared_ptr<const ServedModel> model,
                         const v1::TrainStart& start, uint64_t membership)
    : environment_(environment),
      model_(std::move(model)),
      start_(start),
      membership_(membership),
      shard_group_(sync() ? start.group() : absl::StrCat(start.group(), "#", start.rank())) {}

GroupMember::~GroupMember() { Leave("its stream ended", /*finished=*/false); }

absl::StatusOr<std::unique_ptr<GroupMember>> GroupMember::Join(
    const Environment& environment, std::shared_ptr<const ServedModel> model,
    const v1::TrainStart& start, rpc::CallContext* context) {
  rpc::LinkedContext joining(
      context, absl::Milliseconds(start.options().step_timeout_ms()) + kExchangeMargin);
  auto request = OfRank<internal::v1::JoinRequest>(*model, start);
  *request.mutable_options() = start.options();
  request.set_coordinator(environment.coordinator);
  ASSIGN_OR_RETURN(const auto membership, environment.collective->Join(request, joining.get()));
  auto member = std::unique_ptr<GroupMember>(
      new GroupMember(environment, std::move(model), start, membership.generation()));
  if (absl::Status status = member->FindStep(context); !status.ok()) {
    member->Leave(absl::StrCat("joining: ", status.message()), /*finished=*/false);
    return status;
  }
  return member;
}

template <typename Request>
Request GroupMember::AsMember() const {
  auto request = OfRank<Request>(*model_, start_);
  request.set_generation(membership_);
  return request;
}

// Rank 0 opens the generation on the shards and tells the others; nobody goes on before that.
absl::Status GroupMember::FindStep(rpc::CallContext* context) {
  absl::Status opened;
  if (!sync() || start_.rank() == 0) opened = OpenOnShards(context);
  if (!opened.ok() || !sync()) return opened.ok() ? TellProgress(next_step_, context) : opened;
  RankWait wait;
  const std::string mine =
      absl::StrCat(next_step_, " ", opened_.generation, " ", opened_.made_generation);
  ASSIGN_OR_RETURN(const auto values, Exchange(kFindStep, 0, mine, context, &wait));
  std::vector<std::string> agreed = absl::StrSplit(values.front(), ' ');
  agreed.resize(3, "0");  // a coordinator of an older version does not say the last
  ASSIGN_OR_RETURN(const uint64_t step, UnpackInt(agreed[0]));
  ASSIGN_OR_RETURN(opened_.generation, UnpackInt(agreed[1]));
  ASSIGN_OR_RETURN(opened_.made_generation, UnpackInt(agreed[2]));
  next_step_ = static_cast<int64_t>(step);
  return absl::OkStatus();
}

internal::v1::OpenGroupRequest GroupMember::OpenRequest() const {
  internal::v1::OpenGroupRequest request;
  request.set_model_id(model_->id);
  request.set_history(model_->history);
  request.set_group(shard_group_);
  request.set_size(sync() ? start_.options().size() : 1);
  request.set_step_timeout_ms(start_.options().step_timeout_ms());
  return request;
}

absl::Status GroupMember::OpenOnShards(rpc::CallContext* context) {
  rpc::LinkedContext opening(context, environment_.shard_call);
  internal::v1::OpenGroupRequest request = OpenRequest();
  if (bounded()) request.set_ranks(start_.options().size());
  ASSIGN_OR_RETURN(opened_,
                   OpenGroup(environment_.fanout->shards(), std::move(request), opening.get()));
  RETURN_IF_ERROR(opened_.agreed);
  next_step_ = opened_.next_step < 0 ? start_.options().first_step() : opened_.next_step;
  return absl::OkStatus();
}

GroupPart GroupMember::Part(int64_t step) const {
  if (!sync()) return {shard_group_, opened_.generation, 0, 1, step};
  return {shard_group_, opened_.generation, start_.rank(), start_.options().size(), step};
}

absl::StatusOr<std::vector<std::string>> GroupMember::Exchange(int group_key, int64_t step,
                                                               std::string value,
                                                               rpc::CallContext* context,
                                                               RankWait* wait) {
  if (start_.options().size() == 1) return std::vector<std::string>{std::move(value)};
  const absl::Time began = SteadyNow();
  rpc::LinkedContext exchanging(context, step_timeout() + kExchangeMargin);
  auto request = AsMember<internal::v1::AllGatherRequest>();
  request.set_group_key(group_key);
  request.set_instance_key(step);
  request.set_value(std::move(value));
  const auto gathered = environment_.collective->AllGather(std::move(request), exchanging.get());
  wait->waited += SteadyNow() - began;
  if (!gathered.ok()) return gathered.status();
  const auto& arrival_us = gathered->arrival_us();
  const auto last = std::max_element(arrival_us.begin(), arrival_us.end());
  if (wait->slowest_rank < 0 || absl::Microseconds(*last) > wait->slowest_by) {
    wait->slowest_rank = static_cast<int>(last - arrival_us.begin());
    wait->slowest_by = absl::Microseconds(*last);
  }
  return std::vector<std::string>(gathered->values().begin(), gathered->values().end());
}

absl::StatusOr<bool> GroupMember::AnyNeedsCuts(int64_t step, bool mine, rpc::CallContext* context,
                                               RankWait* wait) {
  if (!sync()) return mine;
  ASSIGN_OR_RETURN(const auto needs, Exchange(kNeedCuts, step, mine ? "1" : "0", context, wait));
  return std::find(needs.begin(), needs.end(), "1") != needs.end();
}

absl::StatusOr<uint64_t> GroupMember::CutsOfAll(int64_t step, uint64_t mine,
                                                rpc::CallContext* context, RankWait* wait) {
  if (!sync()) return mine;
  ASSIGN_OR_RETURN(const auto values, Exchange(kCuts, step, PackInt(mine), context, wait));
  uint64_t cuts = mine;
  for (const std::string& value : values) {
    ASSIGN_OR_RETURN(const uint64_t theirs, UnpackInt(value));
    cuts |= theirs;
  }
  return cuts;
}

absl::Status GroupMember::AllStaged(int64_t step, rpc::CallContext* context, RankWait* wait) {
  if (!sync()) return absl::OkStatus();
  return Exchange(kStaged, step, "", context, wait).status();
}

absl::Status GroupMember::WaitForProgress(int64_t step, rpc::CallContext* context, RankWait* wait) {
  if (!bounded()) return absl::OkStatus();
  const absl::Time began = SteadyNow();
  rpc::LinkedContext waiting(context, step_timeout() + kExchangeMargin);
  auto request = AsMember<internal::v1::AdvanceRequest>();
  request.set_next_step(step);
  request.set_wait_for(std::max<int64_t>(0, step - start_.options().staleness_bound()));
  absl::Status status = environment_.collective->Advance(request, waiting.get());
  wait->waited += SteadyNow() - began;
  return status;
}

absl::Status GroupMember::TellProgress(int64_t next_step, rpc::CallContext* context) {
  if (!bounded()) return absl::OkStatus();
  rpc::LinkedContext telling(context, kExchangeMargin);
  auto request = AsMember<internal::v1::AdvanceRequest>();
  request.set_next_step(next_step);
  for (auto& rank : std::exchange(opened_.ranks, {})) *request.add_ranks() = std::move(rank);
  return environment_.collective->Advance(request, telling.get());
}

// The host of the group hears of it when the rank leaves, but may be started again.
void GroupMember::TellFinished() {
  internal::v1::OpenGroupRequest request = OpenRequest();
  request.set_generation(opened_.generation);
  request.set_opener(opened_.opener);
  request.set_finished(true);
  rpc::CallContext context(SteadyNow() + kExchangeMargin);
  const absl::Status status =
      environment_.fanout->shards().Ask(&ShardBackend::OpenGroup, request, &context).status();
  if (status.ok()) return;
  ops::Log(ops::LogLevel::kInfo, "not all shards know that a rank has finished",
           {{"group", start_.group()}, {"rank", start_.rank()}, {"error", status.ToString()}});
}

void GroupMember::Leave(const std::string& reason, bool finished) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(left_, true)) return;
  }
  if (finished && bounded()) TellFinished();
  auto request = AsMember<internal::v1::LeaveRequest>();
  request.set_reason(reason);
  request.set_finished(finished);
  environment_.collective->Leave(request);
}

}  // namespace emberd::server
