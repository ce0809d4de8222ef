#include "server/group/collective_router.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::group {
namespace {

constexpr absl::Duration kLeaveDeadline = absl::Seconds(1);

// Sends a request, and waits for its answer as long as `context` allows.
template <typename Request, typename Result>
Result Await(Collective* collective, Collective::Method<Request, Result> method, Request request,
             rpc::CallContext* context) {
  // Shared with the callback, since either may be the last to look.
  struct Pending {
    absl::Notification ready;
    std::optional<Result> result;
  };
  auto pending = std::make_shared<Pending>();
  const std::string group = absl::StrCat("group '", request.name().group(), "': ");
  const Collective::Withdraw withdraw =
      (collective->*method)(std::move(request), context, [pending](Result result) {
        pending->result = std::move(result);
        pending->ready.Notify();
      });
  if (!pending->ready.HasBeenNotified()) {
    rpc::CancelWatch watch(context, [&] {
      withdraw(absl::CancelledError(
          absl::StrCat(group, "the caller cancelled the call while it waited for other ranks")));
    });
    if (!pending->ready.WaitForNotificationWithDeadline(context->deadline())) {
      withdraw(absl::DeadlineExceededError(
          absl::StrCat(group, "the caller's deadline passed while it waited for other ranks")));
    }
    pending->ready.WaitForNotification();
  }
  return *std::move(pending->result);
}

}  // namespace

int HostOf(const GroupId& id, int shards) {
  std::string text;
  for (int shift = 0; shift < 64; shift += 8)
    text.push_back(static_cast<char>(id.model_id >> shift));
  const std::array<uint8_t, 32> digest = Sha256(text + id.group);
  uint64_t hash = 0;
  for (int i = 0; i < 8; ++i) hash = hash << 8 | digest[i];
  return static_cast<int>(hash % static_cast<uint64_t>(shards));
}

// Sees a generation end at its host, and ends it here. The host sees that its members are there.
class CollectiveRouter::Watch {
 public:
  Watch(Collective* host, Rendezvous* local, const internal::v1::WatchRequest& request)
      : state_(std::make_shared<State>()) {
    const auto ended = [state = state_, local, id = IdOf(request.name()),
                        generation = request.generation()](const absl::Status& status) {
      absl::MutexLock lock(&state->mutex);
      if (std::exchange(state->over, true)) return;
      local->End(id, generation, status);
    };
    withdraw_ = host->Watch(request, /*context=*/nullptr, ended);
  }
  // Once it has returned, `local` is left alone.
  ~Watch() {
    {
      absl::MutexLock lock(&state_->mutex);
      if (std::exchange(state_->over, true)) return;
    }
    withdraw_(absl::CancelledError("the group is no longer watched"));
  }

  bool over() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->over;
  }

 private:
  // Shared with the callback, since either may go first.
  struct State {
    absl::Mutex mutex;
    bool over ABSL_GUARDED_BY(mutex) = false;
  };

  const std::shared_ptr<State> state_;
  Collective::Withdraw withdraw_;
};

CollectiveRouter::CollectiveRouter(std::vector<Collective*> hosts) : hosts_(std::move(hosts)) {}

CollectiveRouter::~CollectiveRouter() = default;

Collective& CollectiveRouter::HostFor(const GroupId& id) const {
  return *hosts_[HostOf(id, static_cast<int>(hosts_.size()))];
}

absl::StatusOr<internal::v1::JoinResponse> CollectiveRouter::Join(
    const internal::v1::JoinRequest& request, rpc::CallContext* context) {
  const GroupId id = IdOf(request.name());
  ASSIGN_OR_RETURN(internal::v1::JoinResponse membership,
                   Await(&HostFor(id), &Collective::Join, request, context));
  const auto& coordinators = membership.coordinators();
  const bool all_here =
      !coordinators.empty() &&
      std::all_of(coordinators.begin(), coordinators.end(),
                  [&](const auto& other) { return other == request.coordinator(); });

  absl::MutexLock lock(&mutex_);
  std::erase_if(watches_, [](const auto& entry) { return entry.second->over(); });
  std::unique_ptr<Watch>& watch = watches_[{id, membership.generation()}];
  if (watch != nullptr) return membership;  // another rank's join was answered first
  // Without room the host exchanges the values.
  if (all_here) local_.Adopt(id, membership.generation(), request.options());
  internal::v1::WatchRequest watched;
  *watched.mutable_name() = request.name();
  watched.set_generation(membership.generation());
  watched.set_rank(request.rank());
  watch = std::make_unique<Watch>(&HostFor(id), &local_, watched);
  return membership;
}

absl::StatusOr<internal::v1::AllGatherResponse> CollectiveRouter::AllGather(
    internal::v1::AllGatherRequest request, rpc::CallContext* context) {
  const GroupId id = IdOf(request.name());
  Collective& collective = local_.Knows(id, request.generation()) ? local_ : HostFor(id);
  return Await(&collective, &Collective::AllGather, std::move(request), context);
}

absl::Status CollectiveRouter::Advance(const internal::v1::AdvanceRequest& request,
                                       rpc::CallContext* context) {
  return Await(&HostFor(IdOf(request.name())), &Collective::Advance, request, context);
}

void CollectiveRouter::Leave(const internal::v1::LeaveRequest& request) {
  Collective* const host = &HostFor(IdOf(request.name()));
  for (Collective* collective : {static_cast<Collective*>(&local_), host}) {
    rpc::CallContext context(SteadyNow() + kLeaveDeadline);
    Await(collective, &Collective::Leave, request, &context).IgnoreError();
  }
}

}  // namespace emberd::group
