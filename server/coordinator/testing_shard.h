// A shard that can do nothing: tests of coordinators override what theirs ask for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

class TestingShard : public ShardBackend {
 public:
  explicit TestingShard(int index) : index_(index), name_(absl::StrCat("shard ", index)) {}

  int index() const { return index_; }
  const std::string& name() const override { return name_; }
  const std::string& address() const override { return name_; }

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(const internal::v1::FindModelRequest&,
                                                            rpc::CallContext*) override {
    return No();
  }
  absl::Status ServeModel(const internal::v1::ServeModelRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<internal::v1::ListModelsResponse> ListModels(rpc::CallContext*) override {
    return No();
  }
  absl::Status DropModel(const internal::v1::DropModelRequest&, rpc::CallContext*) override {
    return No();
  }
  std::unique_ptr<GatherCall> Gather(GatherCommand, rpc::CallContext*) override { return nullptr; }
  std::unique_ptr<ApplyCall> Apply(ApplyCommand, rpc::CallContext*) override { return nullptr; }
  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(const internal::v1::OpenGroupRequest&,
                                                            rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<RowCounts> DecideStep(const internal::v1::DecideStepRequest&,
                                       rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
      const internal::v1::DropGroupsRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::Status RenewBatches(const std::vector<uint64_t>&, absl::Duration,
                            rpc::CallContext*) override {
    return No();
  }
  absl::Status ReleaseBatch(uint64_t, uint64_t, rpc::CallContext*) override { return No(); }
  absl::Status ReadRows(const shard::RowSelection&, absl::Span<float>, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<bool> StageAssign(const AssignCommand&, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<MutationVotes::Found> FindMutation(const Mutation&, uint64_t,
                                                    rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<RowCounts> DecideMutation(const Mutation&, uint64_t, bool,
                                           rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<std::vector<Mutation>> ListUndecided(absl::Duration, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<internal::v1::PauseChangesResponse> PauseChanges(
      const internal::v1::PauseChangesRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::Status ResumeChanges(const internal::v1::ResumeChangesRequest&,
                             rpc::CallContext*) override {
    return No();
  }
  absl::Status BeginSave(const internal::v1::BeginSaveRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::Status CompleteSave(const internal::v1::CompleteSaveRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::Status BeginRestore(const internal::v1::BeginRestoreRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<internal::v1::GetTransferResponse> GetTransfer(
      const internal::v1::GetTransferRequest&, rpc::CallContext*) override {
    return No();
  }
  absl::Status CancelTransfer(const internal::v1::CancelTransferRequest&,
                              rpc::CallContext*) override {
    return No();
  }
  absl::StatusOr<v1::ShardStatus> GetStatus(int, rpc::CallContext*) override { return No(); }
  absl::StatusOr<v1::ShardMemoryChange> ChangeMemory(const v1::ChangeMemoryRequest&,
                                                     rpc::CallContext*) override {
    return No();
  }
  Collective* collective() override { return nullptr; }

 private:
  absl::Status No() const { return absl::UnimplementedError(name_); }

  const int index_;
  const std::string name_;
};

}  // namespace emberd::server
