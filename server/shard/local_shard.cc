#include <cassert>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "server/group/rendezvous.h"
#include "server/shard/drop_groups.h"
#include "server/shard/shard_backend.h"
#include "server/shard/shard_host.h"

namespace emberd::server {
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

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest& request, rpc::CallContext*) override {
    return Named(host_->CreateModel(request));
  }
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(
      const internal::v1::FindModelRequest& request, rpc::CallContext*) override {
    return Named(host_->FindModel(request));
  }
  absl::Status ServeModel(const internal::v1::ServeModelRequest& request,
                          rpc::CallContext*) override {
    return Annotate(host_->ServeModel(request), name_);
  }
  absl::StatusOr<internal::v1::ListModelsResponse> ListModels(rpc::CallContext*) override {
    return host_->ListModels();
  }
  absl::Status DropModel(const internal::v1::DropModelRequest& request,
                         rpc::CallContext*) override {
    return Annotate(host_->DropModel(request), name_);
  }
  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalGather>(host_.get(), std::move(command), name_);
  }
  bool Lend(const NamedRegion&) override { return true; }  // it is mapped here
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalApply>(host_.get(), std::move(command), name_);
  }
  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(
      const internal::v1::OpenGroupRequest& request, rpc::CallContext*) override {
    return Named(host_->OpenGroup(request));
  }
  absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
      const internal::v1::DropGroupsRequest& request, rpc::CallContext*) override {
    return Named(server::DropGroups(host_.get(), &rendezvous_, request));
  }
  absl::StatusOr<RowCounts> DecideStep(const internal::v1::DecideStepRequest& request,
                                       rpc::CallContext*) override {
    Promise<absl::StatusOr<RowCounts>> promise;
    host_->DecideStep(request, [&](auto rows) { promise.Set(std::move(rows)); });
    return Named(std::move(promise.Wait()));
  }
  absl::Status RenewBatches(const std::vector<uint64_t>& batch_handles, absl::Duration batch_ttl,
                            rpc::CallContext*) override {
    for (const uint64_t handle : batch_handles) host_->RenewBatch(handle, batch_ttl);
    return absl::OkStatus();
  }
  absl::Status ReleaseBatch(uint64_t model_id, uint64_t batch_handle, rpc::CallContext*) override {
    return Annotate(host_->ReleaseBatch(model_id, batch_handle), name_);
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
    return Named(std::move(promise.Wait()));
  }
  absl::StatusOr<MutationVotes::Found> FindMutation(const Mutation& mutation, uint64_t attempt,
                                                    rpc::CallContext*) override {
    Promise<absl::StatusOr<MutationVotes::Found>> promise;
    host_->FindMutation(mutation, attempt, [&](auto found) { promise.Set(std::move(found)); });
    return Named(std::move(promise.Wait()));
  }
  absl::StatusOr<RowCounts> DecideMutation(const Mutation& mutation, uint64_t attempt, bool commit,
                                           rpc::CallContext*) override {
    Promise<absl::StatusOr<RowCounts>> promise;
    host_->DecideMutation(mutation, attempt, commit,
                          [&](auto rows) { promise.Set(std::move(rows)); });
    return Named(std::move(promise.Wait()));
  }
  absl::StatusOr<std::vector<Mutation>> ListUndecided(absl::Duration older_than,
                                                      rpc::CallContext*) override {
    return host_->Undecided(older_than);
  }
  absl::StatusOr<internal::v1::PauseChangesResponse> PauseChanges(
      const internal::v1::PauseChangesRequest& request, rpc::CallContext*) override {
    return Named(host_->checkpoints().Pause(request));
  }
  absl::Status ResumeChanges(const internal::v1::ResumeChangesRequest& request,
                             rpc::CallContext*) override {
    return Annotate(host_->checkpoints().Resume(request), name_);
  }
  absl::Status BeginSave(const internal::v1::BeginSaveRequest& request,
                         rpc::CallContext*) override {
    return Annotate(host_->checkpoints().BeginSave(request), name_);
  }
  absl::Status CompleteSave(const internal::v1::CompleteSaveRequest& request,
                            rpc::CallContext*) override {
    return Annotate(host_->checkpoints().CompleteSave(request), name_);
  }
  absl::Status BeginRestore(const internal::v1::BeginRestoreRequest& request,
                            rpc::CallContext*) override {
    return Annotate(host_->checkpoints().BeginRestore(request), name_);
  }
  absl::StatusOr<internal::v1::GetTransferResponse> GetTransfer(
      const internal::v1::GetTransferRequest& request, rpc::CallContext*) override {
    return Named(host_->checkpoints().GetTransfer(request));
  }
  absl::Status CancelTransfer(const internal::v1::CancelTransferRequest& request,
                              rpc::CallContext*) override {
    return Annotate(host_->checkpoints().Cancel(request), name_);
  }
  absl::StatusOr<v1::ShardStatus> GetStatus(int hot_rows, rpc::CallContext*) override {
    v1::ShardStatus status = host_->GetStatus(hot_rows);
    status.set_address(address_);
    return status;
  }
  absl::StatusOr<v1::ShardMemoryChange> ChangeMemory(const v1::ChangeMemoryRequest& request,
                                                     rpc::CallContext*) override {
    return Named(host_->ChangeMemory(request));
  }
  Collective* collective() override { return &rendezvous_; }

 private:
  template <typename T>
  absl::StatusOr<T> Named(absl::StatusOr<T> value) const {
    if (value.ok()) return value;
    return Annotate(value.status(), name_);
  }

  const std::string name_;
  const std::string address_ = "in-process";
  const std::unique_ptr<ShardHost> host_;
  Rendezvous rendezvous_;
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

}  // namespace emberd::server
