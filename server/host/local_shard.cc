#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "server/group/rendezvous.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_host.h"

namespace emberd::host {
namespace {

// The result of a callback that another thread waits for. Shared by both, since either may be the
// last to look.
template <typename T>
class Promise {
 public:
  void Set(T value) {
    value_ = std::move(value);
    ready_.Notify();
  }
  T& Wait() {
    ready_.WaitForNotification();
    return value_;
  }

 private:
  absl::Notification ready_;
  T value_ = absl::UnknownError("no answer");
};

class LocalGather final : public GatherCall {
 public:
  LocalGather(ShardHost* host, GatherCommand command, std::string name) : name_(std::move(name)) {
    host->Gather(std::move(command),
                 [promise = promise_](auto result) { promise->Set(std::move(result)); });
  }
  absl::StatusOr<GatherResult> Wait() override {
    absl::StatusOr<GatherResult>& result = promise_->Wait();
    if (!result.ok()) return Annotate(result.status(), name_);
    return std::move(result);
  }

 private:
  const std::string name_;
  std::shared_ptr<Promise<absl::StatusOr<GatherResult>>> promise_ =
      std::make_shared<Promise<absl::StatusOr<GatherResult>>>();
};

class LocalApply final : public ApplyCall {
 public:
  LocalApply(ShardHost* host, ApplyCommand command, std::string name)
      : host_(host), name_(std::move(name)) {
    host_->Stage(std::move(command),
                 [promise = staged_](auto staged) { promise->Set(std::move(staged)); });
  }
  absl::StatusOr<StageOutcome> WaitStaged() override {
    absl::StatusOr<ShardHost::StagedApply>& staged = staged_->Wait();
    if (!staged.ok()) return Annotate(staged.status(), name_);
    return staged->outcome();
  }
  void Decide(bool commit) override {
    const ShardHost::StagedApply& staged = *staged_->Wait();
    if (commit) {
      host_->Commit(staged, [promise = done_](auto rows) { promise->Set(std::move(rows)); });
    } else {
      host_->Discard(staged);
      done_->Set(RowCounts());
    }
  }
  absl::StatusOr<RowCounts> WaitDone() override {
    absl::StatusOr<RowCounts>& rows = done_->Wait();
    return rows.ok() ? rows : Annotate(rows.status(), name_);
  }

 private:
  ShardHost* const host_;
  const std::string name_;
  std::shared_ptr<Promise<absl::StatusOr<ShardHost::StagedApply>>> staged_ =
      std::make_shared<Promise<absl::StatusOr<ShardHost::StagedApply>>>();
  std::shared_ptr<Promise<absl::StatusOr<RowCounts>>> done_ =
      std::make_shared<Promise<absl::StatusOr<RowCounts>>>();
};

class LocalShard final : public ShardBackend {
 public:
  LocalShard(std::unique_ptr<ShardHost> host, int index)
      : name_(absl::StrCat("shard ", index)), host_(std::move(host)) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return address_; }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalGather>(host_.get(), std::move(command), name_);
  }
  bool Lend(const NamedRegion&) override { return true; }  // it is mapped here
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalApply>(host_.get(), std::move(command), name_);
  }
  absl::Status ReadRows(const shard::RowSelection& selection, absl::Span<float> values,
                        rpc::CallContext*) override {
    Promise<absl::Status> promise;
    host_->ReadRows(selection, values,
                    [&](absl::Status status) { promise.Set(std::move(status)); });
    return Annotate(promise.Wait(), name_);
  }
  absl::StatusOr<bool> StageAssign(const AssignCommand& command, rpc::CallContext*) override {
    Promise<absl::StatusOr<bool>> promise;
    host_->StageAssign(command, [&](auto replayed) { promise.Set(std::move(replayed)); });
    absl::StatusOr<bool>& replayed = promise.Wait();
    return replayed.ok() ? replayed : Annotate(replayed.status(), name_);
  }
  group::Collective* collective() override { return &rendezvous_; }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext*) override {
    Promise<absl::Status> promise;
    verbs_.Run(verb, request, response, [&](const absl::Status& status) { promise.Set(status); });
    return Annotate(promise.Wait(), name_);
  }

  const std::string name_;
  const std::string address_ = "in-process";
  const std::unique_ptr<ShardHost> host_;
  group::Rendezvous rendezvous_;
  ShardVerbs verbs_{host_.get(), &rendezvous_};
};

}  // namespace

absl::StatusOr<std::shared_ptr<ShardBackend>> MakeLocalShard(const v1::ClusterConfig& cluster,
                                                             int shard_index, ops::Metrics* metrics,
                                                             ThreadPools* threads) {
  ASSIGN_OR_RETURN(std::unique_ptr<ShardHost> host,
                   ShardHost::Create(cluster, shard_index, metrics, threads));
  host->WaitUntilReady();
  RETURN_IF_ERROR(Annotate(host->CheckReady(), absl::StrCat("shard ", shard_index)));
  return std::make_shared<LocalShard>(std::move(host), shard_index);
}

}  // namespace emberd::host
