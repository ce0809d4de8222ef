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

namespace emberd::server {
namespace {

constexpr absl::Duration kLeaveDeadline = absl::Seconds(1);

// Starts a call with start(done), and waits for its answer as long as `context` allows.
template <typename Result, typename Start>
Result Await(const GroupId& id, rpc::CallContext* context, const Start& start) {
  // Shared with the callback, since either may be the last to look.
  struct Pending {
    absl::Notification ready;
    std::optional<Result> result;
  };
  auto pending = std::make_shared<Pending>();
  const Collective::Withdraw withdraw = start([pending](Result result) {
    pending->result = std::move(result);
    pending->ready.Notify();
  });
  if (!pending->ready.HasBeenNotified()) {
    const std::string group = absl::StrCat("group '", id.group, "': ");
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
  Watch(Collective* host, Rendezvous* local, const GroupId& id, uint64_t generation, int rank)
      : state_(std::make_shared<State>()) {
    withdraw_ = host->Watch(id, generation, rank,
                            [state = state_, local, id, generation](const absl::Status& status) {
                              absl::MutexLock lock(&state->mutex);
                              if (std::exchange(state->over, true)) return;
                              local->End(id, generation, status);
                            });
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

absl::StatusOr<Membership> CollectiveRouter::Join(const GroupId& id, JoinCall call,
                                                  rpc::CallContext* context) {
  absl::StatusOr<Membership> membership = Await<absl::StatusOr<Membership>>(
      id, context, [&](auto done) { return HostFor(id).Join(id, call, context, std::move(done)); });
  if (!membership.ok()) return membership;
  const std::vector<std::string>& coordinators = membership->coordinators;
  const bool all_here = !coordinators.empty() &&
                        std::all_of(coordinators.begin(), coordinators.end(),
                                    [&](const auto& other) { return other == call.coordinator; });

  absl::MutexLock lock(&mutex_);
  std::erase_if(watches_, [](const auto& entry) { return entry.second->over(); });
  std::unique_ptr<Watch>& watch = watches_[{id, membership->generation}];
  if (watch != nullptr) return membership;  // another rank's join was answered first
  // Without room the host exchanges the values.
  if (all_here) local_.Adopt(id, membership->generation, call.options);
  watch = std::make_unique<Watch>(&HostFor(id), &local_, id, membership->generation, call.rank);
  return membership;
}

absl::StatusOr<Gathered> CollectiveRouter::AllGather(const GroupId& id, ExchangeCall call,
                                                     rpc::CallContext* context) {
  Collective& collective = local_.Knows(id, call.generation) ? local_ : HostFor(id);
  return Await<absl::StatusOr<Gathered>>(id, context, [&](auto done) {
    return collective.AllGather(id, std::move(call), context, std::move(done));
  });
}

absl::Status CollectiveRouter::Advance(const GroupId& id, const AdvanceCall& call,
                                       rpc::CallContext* context) {
  return Await<absl::Status>(id, context, [&](auto done) {
    return HostFor(id).Advance(id, call, context, std::move(done));
  });
}

void CollectiveRouter::Leave(const GroupId& id, const LeaveCall& call) {
  for (Collective* collective : {static_cast<Collective*>(&local_), &HostFor(id)}) {
    rpc::CallContext context(SteadyNow() + kLeaveDeadline);
    Await<absl::Status>(id, &context, [&](auto done) {
      return collective->Leave(id, call, &context, std::move(done));
    }).IgnoreError();
  }
}

}  // namespace emberd::server
