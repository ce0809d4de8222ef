#include "server/group/local_collective.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/group/watch_callback.h"

namespace emberd::server {
namespace {

// An answer that another thread waits for. Shared by both, since either may be the last to look.
template <typename Result>
struct Pending {
  absl::Notification ready;
  std::optional<Result> result;
};

class LocalWatch final : public GenerationWatch {
 public:
  LocalWatch(Rendezvous* rendezvous, const GroupId& id, uint64_t generation,
             std::function<void(absl::Status)> ended)
      : rendezvous_(rendezvous),
        callback_(std::make_shared<WatchCallback>(std::move(ended))),
        call_(rendezvous->Watch(id, generation, [callback = callback_](const absl::Status& status) {
          callback->Run(status);
        })) {}
  ~LocalWatch() override {
    callback_->Drop();
    rendezvous_->Withdraw(call_, absl::CancelledError("nobody watches any more"));
  }

 private:
  Rendezvous* const rendezvous_;
  const std::shared_ptr<WatchCallback> callback_;
  const Rendezvous::Call call_;
};

class LocalCollective final : public Collective {
 public:
  explicit LocalCollective(Rendezvous* rendezvous) : rendezvous_(rendezvous) {}

  absl::StatusOr<Membership> Join(const GroupId& id, int rank, const v1::GroupOptions& options,
                                  const std::string& coordinator,
                                  rpc::CallContext* context) override {
    return Await<absl::StatusOr<Membership>>(id, context, [&](auto done) {
      return rendezvous_->Join(id, rank, options, coordinator, std::move(done));
    });
  }
  absl::StatusOr<Gathered> AllGather(const GroupId& id, uint64_t generation, int rank,
                                     int group_key, int64_t instance_key, std::string value,
                                     rpc::CallContext* context) override {
    return Await<absl::StatusOr<Gathered>>(id, context, [&](auto done) {
      return rendezvous_->AllGather(
          id, {generation, rank, {instance_key, group_key}, std::move(value)}, std::move(done));
    });
  }
  absl::Status Advance(const GroupId& id, uint64_t generation, int rank, int64_t next_step,
                       int64_t wait_for, rpc::CallContext* context) override {
    return Await<absl::Status>(id, context, [&](auto done) {
      return rendezvous_->Advance(id, {generation, rank, next_step, wait_for}, std::move(done));
    });
  }
  void Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
             bool finished) override {
    rendezvous_->Leave(id, generation, rank, reason, finished).IgnoreError();
  }
  std::unique_ptr<GenerationWatch> Watch(const GroupId& id, uint64_t generation,
                                         std::function<void(absl::Status)> ended) override {
    return std::make_unique<LocalWatch>(rendezvous_, id, generation, std::move(ended));
  }

 private:
  // `start` hands a callback to the rendezvous and returns the call.
  template <typename Result, typename Start>
  Result Await(const GroupId& id, rpc::CallContext* context, const Start& start) {
    auto pending = std::make_shared<Pending<Result>>();
    const Rendezvous::Call call = start([pending](Result result) {
      pending->result = std::move(result);
      pending->ready.Notify();
    });
    const std::string group = absl::StrCat("group '", id.group, "': ");
    if (!pending->ready.HasBeenNotified()) {
      rpc::CancelWatch watch(context, [&] {
        rendezvous_->Withdraw(call, absl::CancelledError(absl::StrCat(
                                        group, "the caller gave up waiting for other ranks")));
      });
      if (!pending->ready.WaitForNotificationWithDeadline(context->deadline())) {
        rendezvous_->Withdraw(call, absl::DeadlineExceededError(absl::StrCat(
                                        group,
                                        "the caller's deadline passed while it waited for "
                                        "other ranks")));
      }
      pending->ready.WaitForNotification();
    }
    return *std::move(pending->result);
  }

  Rendezvous* const rendezvous_;
};

}  // namespace

std::unique_ptr<Collective> MakeLocalCollective(Rendezvous* rendezvous) {
  return std::make_unique<LocalCollective>(rendezvous);
}

}  // namespace emberd::server
