// The training groups that a process hosts.
//
// Nothing blocks: a call that must wait is answered later through its callback. Callbacks run on
// the thread that completes them (a later caller's, or the one that watches deadlines), outside of
// all locks; they must be short.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/group/collective.h"
#include "server/group/group.h"

namespace emberd::server {

struct RendezvousOptions {
  int max_groups = 4096;
  int64_t max_value_bytes = int64_t{256} << 20;  // of all values held, over all groups
  // Never goes back. Empty: the wall clock at the start and the steady clock from there. With a
  // clock of its own a Rendezvous has no thread: its owner calls ExpireNow.
  std::function<absl::Time()> clock = nullptr;
};

// Thread-safe. What each call means and its errors: emberd/internal/v1/collective_service.proto.
class Rendezvous {
 public:
  using JoinCallback = Group::JoinCall::Callback;
  using GatherCallback = Group::GatherCall::Callback;
  using StatusCallback = Group::StatusCall::Callback;

  // Names a call for Withdraw.
  struct Call {
    GroupId id;
    Ticket ticket = 0;
  };

  explicit Rendezvous(RendezvousOptions options = {});
  // Closes first.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Each takes its callback and calls it exactly once.
  Call Join(const GroupId& id, int rank, const v1::GroupOptions& options,
            const std::string& coordinator, JoinCallback done);
  Call AllGather(const GroupId& id, ExchangeCall call, GatherCallback done);
  Call Advance(const GroupId& id, const AdvanceCall& call, StatusCallback done);
  // SYNC: waits for the end of the generation, and tells why it ended. The group takes no other
  // notice of who watches.
  Call Watch(const GroupId& id, uint64_t generation, StatusCallback done);
  // INVALID_ARGUMENT if the group's name cannot be one.
  absl::Status Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
                     bool finished);

  // Answers a call that still waits with `status`, as if it had never come; but a value that it
  // brought to an exchange stays there. When this returns, the callback has run or runs elsewhere.
  void Withdraw(const Call& call, const absl::Status& status);

  // For members that are all served by this process, of a generation that another host started:
  // from now on AllGather and Leave work here too. An older generation of the group ends here.
  // False: there is no room.
  bool Adopt(const GroupId& id, uint64_t generation, const v1::GroupOptions& options);
  // The SYNC generation lives here, or was the group's last to live here.
  bool Knows(const GroupId& id, uint64_t generation) const;
  // Ends a SYNC generation, if it lives here.
  void End(const GroupId& id, uint64_t generation, const absl::Status& status);

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
    absl::Time timer = absl::InfiniteFuture();  // its place in timers_
    int64_t value_bytes = 0;                    // as counted in value_bytes_
  };
  using Groups = std::map<GroupId, Entry>;

  // Under the lock, runs `work(group, done, turn)`; outside of it, carries out the answers. A rank
  // or group that is not here is answered with an error.
  template <typename Callback, typename Work>
  Call OnMember(const GroupId& id, uint64_t generation, int rank, Callback done, const Work& work);
  // The same for calls without an answer: nothing happens for a group that is not here.
  void OnGroup(const GroupId& id, const std::function<void(Group&, Turn*)>& work);

  // No call waits there, and none has come for long.
  static bool Forgettable(const Group& group, absl::Time now);
  Turn NewTurn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status CheckOpen(const GroupId& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The group, made if it is not here.
  absl::StatusOr<Groups::iterator> FindOrCreate(const GroupId& id, const v1::GroupOptions& options,
                                                Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeRoom(const GroupId& id, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Groups::iterator group, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  uint64_t last_generation_ ABSL_GUARDED_BY(mutex_) = 0;
  Ticket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t value_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread timer_thread_;
};

}  // namespace emberd::server
