#include "server/host/collective_router.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"

namespace emberd::host {
namespace {

constexpr absl::Duration kLeaveDeadline = absl::Seconds(1);
// No trainer waits then, and a coordinator that stops may not come to say it again.
constexpr absl::Duration kFinishDeadline = absl::Seconds(5);

}  // namespace

CollectiveRouter::CollectiveRouter(std::vector<std::shared_ptr<ShardBackend>> shards,
                                   BlockingPool* threads)
    : shards_(std::move(shards)), threads_(threads) {}

CollectiveRouter::~CollectiveRouter() {
  absl::MutexLock lock(&mutex_);
  for (const auto& [generation, context] : watches_) context->Cancel();
  while (!watches_.empty()) watch_over_.Wait(&mutex_);
}

ShardBackend& CollectiveRouter::HostOf(const internal::v1::GroupName& name) const {
  return *shards_[group::HostOf(group::IdOf(name), static_cast<int>(shards_.size()))];
}

absl::StatusOr<internal::v1::JoinResponse> CollectiveRouter::Join(
    const internal::v1::JoinRequest& request, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(internal::v1::JoinResponse membership,
                   HostOf(request.name()).Join(request, context));
  const auto& coordinators = membership.coordinators();
  const bool all_here =
      !coordinators.empty() &&
      std::all_of(coordinators.begin(), coordinators.end(),
                  [&](const auto& other) { return other == request.coordinator(); });
  internal::v1::WatchRequest watched;
  *watched.mutable_name() = request.name();
  watched.set_generation(membership.generation());
  watched.set_rank(request.rank());
  const Generation generation = {group::IdOf(request.name()), membership.generation()};

  {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<rpc::CallContext>& watch = watches_[generation];
    if (watch != nullptr) return membership;  // another rank's join was answered first
    // Without room the host exchanges the values.
    if (all_here) local_.Adopt(generation.first, generation.second, request.options());
    watch = std::make_shared<rpc::CallContext>(absl::InfiniteFuture());
    if (threads_->Run([=, this, context = watch] { Watch(watched, context.get()); })) {
      return membership;
    }
    watches_.erase(generation);
  }
  const absl::Status no_thread = absl::ResourceExhaustedError(
      "no thread can be had to watch over the group's members; retry later");
  local_.End(generation.first, generation.second, no_thread);
  internal::v1::LeaveRequest leave;
  *leave.mutable_name() = request.name();
  leave.set_generation(membership.generation());
  leave.set_rank(request.rank());
  leave.set_reason(std::string(no_thread.message()));
  Leave(leave);
  return no_thread;
}

void CollectiveRouter::Watch(const internal::v1::WatchRequest& request, rpc::CallContext* context) {
  const Generation generation = {group::IdOf(request.name()), request.generation()};
  const absl::Status end = HostOf(request.name()).Watch(request, context).status();
  local_.End(generation.first, generation.second, end);
  context->Cancel();
  absl::MutexLock lock(&mutex_);
  watches_.erase(generation);
  watch_over_.Signal();
}

std::shared_ptr<const rpc::CallContext> CollectiveRouter::WatchOf(
    const internal::v1::GroupName& name, uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  const auto found = watches_.find({group::IdOf(name), generation});
  if (found != watches_.end()) return found->second;
  auto over = std::make_shared<rpc::CallContext>(absl::InfiniteFuture());
  over->Cancel();
  return over;
}

absl::StatusOr<internal::v1::AllGatherResponse> CollectiveRouter::AllGather(
    const internal::v1::AllGatherRequest& request, rpc::CallContext* context) {
  if (!local_.Knows(group::IdOf(request.name()), request.generation())) {
    return HostOf(request.name()).AllGather(request, context);
  }
  internal::v1::AllGatherResponse response;
  RETURN_IF_ERROR(local_verbs_.Call(ShardVerb::kAllGather, request, &response, context));
  return response;
}

absl::Status CollectiveRouter::Advance(const internal::v1::AdvanceRequest& request,
                                       rpc::CallContext* context) {
  return HostOf(request.name()).Advance(request, context).status();
}

void CollectiveRouter::Leave(const internal::v1::LeaveRequest& request,
                             std::optional<internal::v1::OpenGroupRequest> finished) {
  local_.Leave(request, [](const absl::Status&) {});
  const bool ends = finished.has_value();
  rpc::CallContext context(SteadyNow() + (ends ? kFinishDeadline : kLeaveDeadline));
  const Leaving leaving = {request, std::move(finished)};
  // The host first, where others may wait for this rank. Should a shard take all the time, Retry
  // tells those that come after it.
  const size_t host = group::HostOf(group::IdOf(request.name()), static_cast<int>(shards_.size()));
  for (size_t i = 0; i < (ends ? shards_.size() : 1); ++i) {
    Tell((host + i) % shards_.size(), leaving, &context);
  }
}

void CollectiveRouter::Retry() {
  std::vector<std::pair<size_t, std::vector<Leaving>>> unheard;
  {
    absl::MutexLock lock(&mutex_);
    unheard.assign(unheard_.begin(), unheard_.end());
    unheard_.clear();
  }
  // One shard that stands still keeps no other one from hearing.
  threads_->RunEach(static_cast<int>(unheard.size()), [&](int i) {
    rpc::CallContext context(SteadyNow() + kLeaveDeadline);
    for (Leaving& leaving : unheard[i].second) Tell(unheard[i].first, std::move(leaving), &context);
  });
}

void CollectiveRouter::Tell(size_t shard, Leaving leaving, rpc::CallContext* context) {
  ShardBackend& backend = *shards_[shard];
  const internal::v1::LeaveRequest& request = leaving.request;
  absl::Status told;
  const auto deaf = [&] { return absl::IsUnavailable(told) || absl::IsDeadlineExceeded(told); };
  if (leaving.finished.has_value()) told = backend.OpenGroup(*leaving.finished, context).status();
  if (!deaf() && &backend == &HostOf(request.name())) {
    told = backend.Leave(request, context).status();
  }
  if (!deaf()) return;
  if (!std::exchange(leaving.logged, true)) {
    ops::Log(ops::LogLevel::kInfo, "a shard does not hear that a rank has left; it is told again",
             {{"finished", leaving.finished.has_value()},
              {"group", request.name().group()},
              {"rank", request.rank()},
              {"reason", std::string(told.message())}});
  }
  absl::MutexLock lock(&mutex_);
  unheard_[shard].push_back(std::move(leaving));
}

}  // namespace emberd::host
