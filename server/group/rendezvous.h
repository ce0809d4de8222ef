// The training groups that a process hosts.
//
// A call that must wait is answered later, on the thread that completes it (a later caller's, or
// the one that watches deadlines), outside of all locks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/group/group.h"

namespace emberd::group {

struct RendezvousOptions {
  int max_groups = 4096;
  int64_t max_value_bytes = int64_t{256} << 20;  // of all values held, over all groups
  // Before the first of the host; 0: random, so that no two lives of a host have the same ones.
  uint64_t last_generation = 0;
  // Never goes back. Empty: the wall clock at the start and the steady clock from there. With a
  // clock of its own a Rendezvous has no thread: its owner calls ExpireNow.
  std::function<absl::Time()> clock = nullptr;
};

// Answers the call that returned it with this status, which is not OK, if it still waits; the
// message will begin with the group's name. The call is then as if it had never come; but a value
// that it brought to an exchange stays there.
using Withdraw = std::function<void(const absl::Status&)>;

// Thread-safe.
class Rendezvous {
 public:
  explicit Rendezvous(RendezvousOptions options = {});
  // Closes first.
  ~Rendezvous();

  // The calls of ShardService. Nothing blocks: each runs its callback exactly once, now or later,
  // on any thread; callbacks must be short. When the result comes back from a call, its callback
  // has run or runs elsewhere; the rendezvous must outlive it, and it may be null.
  Withdraw Join(const internal::v1::JoinRequest& request, JoinDone done);
  Withdraw AllGather(internal::v1::AllGatherRequest request, GatherDone done);
  Withdraw Advance(const internal::v1::AdvanceRequest& request, StatusDone done);
  Withdraw Leave(const internal::v1::LeaveRequest& request, const StatusDone& done);
  // Never answered with OK.
  Withdraw Watch(const internal::v1::WatchRequest& request, StatusDone done);

  // For members that are all served by this process, of a generation that another host started:
  // from now on AllGather and Leave work here too. An older generation of the group ends here.
  // False: there is no room.
  bool Adopt(const GroupId& id, uint64_t generation, const v1::GroupOptions& options);
  // The SYNC generation lives here, or was the group's last to live here.
  bool Knows(const GroupId& id, uint64_t generation) const;
  // Ends a SYNC generation, if it lives here.
  void End(const GroupId& id, uint64_t generation, const absl::Status& status);

  // Forgets a group. FAILED_PRECONDITION: somebody is in it.
  absl::Status Forget(const GroupId& id);

  // Answers every call that waits, and all that come later, with `status`.
  void Close(const absl::Status& status);

  // Answers what is overdue, forgets idle groups. For owners that brought a clock.
  void ExpireNow();

  struct Load : GroupLoad {
    size_t groups = 0;
  };
  Load load() const;

 private:
  struct Entry {
    std::unique_ptr<Group> group;
    uint64_t history = 0;                       // JoinRequest.history
    absl::Time timer = absl::InfiniteFuture();  // its place in timers_
    int64_t value_bytes = 0;                    // as counted in value_bytes_
  };
  using Groups = std::map<GroupId, Entry>;
  // Has the lock; gives the event's answers when it has let it go.
  class ABSL_SCOPED_LOCKABLE LockedEvent : public Event {
   public:
    explicit LockedEvent(Rendezvous* host) ABSL_EXCLUSIVE_LOCK_FUNCTION(host->mutex_);
    ~LockedEvent() ABSL_UNLOCK_FUNCTION();

   private:
    absl::Mutex* const mutex_;
  };

  // Under the lock, runs `work(event)`, which hands `done` to a group or returns an error for it;
  // then gives the event's answers.
  template <typename Done, typename Work>
  Withdraw OnCall(const GroupId& id, const Done& done, const Work& work);
  // The same with `work(group, event)`, for a rank of a group that is here.
  template <typename Request, typename Done, typename Work>
  Withdraw OnMember(const Request& request, const Done& done, const Work& work);
  // The same for what has no answer: nothing happens for a group that is not here.
  void OnGroup(const GroupId& id, const std::function<void(Group&, Event*)>& work);

  // No call waits there, and none has come for long.
  static bool Forgettable(const Group& group, absl::Time now);

  absl::Status CheckOpen(const GroupId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The group, made if it is not here, or for rows of another history (0: whichever).
  absl::StatusOr<Groups::iterator> FindOrCreate(const GroupId& id, const v1::GroupOptions& options,
                                                uint64_t history, Event* event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeRoom(Event* event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Groups::iterator group, Event* event, absl::string_view why = "it was idle")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings the timer and the sums up to date after the group has changed.
  void Settle(Groups::iterator group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunTimers();

  const RendezvousOptions options_;
  const std::function<absl::Time()> clock_;

  mutable absl::Mutex mutex_;
  absl::CondVar timers_changed_;
  Groups groups_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, GroupId>> timers_ ABSL_GUARDED_BY(mutex_);
  absl::Time wakes_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // the timer thread
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_generation_ ABSL_GUARDED_BY(mutex_);
  Ticket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t value_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread timer_thread_;
};

}  // namespace emberd::group
