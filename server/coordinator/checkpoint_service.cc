#include "server/coordinator/checkpoint_service.h"

#include <memory>
#include <optional>
#include <utility>

#include "base/status.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "server/coordinator/progress_stream.h"
#include "server/coordinator/pulled_stream.h"

namespace emberd::server {
namespace {

// For callers without a deadline: a checkpoint takes as long as it takes.
constexpr absl::Duration kLimit = absl::Hours(24);

class CheckpointServiceImpl final : public v1::CheckpointService::CallbackService {
 public:
  CheckpointServiceImpl(Checkpoints* checkpoints, const CallEnvironment& environment)
      : checkpoints_(checkpoints), environment_(environment) {}

  using Context = grpc::CallbackServerContext;
  using Progress = v1::CheckpointProgress;
  using ProgressReactor = grpc::ServerWriteReactor<Progress>;

  ProgressReactor* SaveCheckpoint(Context* context,
                                  const v1::SaveCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kSaveCheckpoint,
                        [=, this](auto* call, const auto& report) {
                          return checkpoints_->Save(*request, report, call);
                        });
  }
  ProgressReactor* RestoreCheckpoint(Context* context,
                                     const v1::RestoreCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kRestoreCheckpoint,
                        [=, this](auto* call, const auto& report) {
                          return checkpoints_->Restore(*request, report, call);
                        });
  }
  ProgressReactor* ServeCheckpoint(Context* context,
                                   const v1::ServeCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kServeCheckpoint,
                        [=, this](auto* call, const auto& report) {
                          return checkpoints_->Serve(*request, report, call);
                        });
  }
  ProgressReactor* VerifyCheckpoint(Context* context,
                                    const v1::VerifyCheckpointRequest* request) override {
    return WithProgress(
        *context, ops::Rpc::kVerifyCheckpoint,
        [=, this](auto*, const auto& report) { return checkpoints_->Verify(*request, report); });
  }
  ProgressReactor* MergeCheckpoint(Context* context,
                                   const v1::MergeCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kMergeCheckpoint, [=, this](auto*, const auto& report) {
      return checkpoints_->Merge(*request, report);
    });
  }

  grpc::ServerUnaryReactor* DiffCheckpoints(Context* context,
                                            const v1::DiffCheckpointsRequest* request,
                                            v1::DiffCheckpointsResponse* response) override {
    return Unary(*context, ops::Rpc::kDiffCheckpoints, response,
                 [=, this](auto* call) { return checkpoints_->Diff(*request, call); });
  }
  grpc::ServerUnaryReactor* ListCheckpoints(Context* context,
                                            const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsResponse* response) override {
    return Unary(*context, ops::Rpc::kListCheckpoints, response,
                 [=, this](auto*) { return checkpoints_->List(*request); });
  }
  grpc::ServerUnaryReactor* GetCheckpoint(Context* context, const v1::GetCheckpointRequest* request,
                                          v1::CheckpointManifest* response) override {
    return Unary(*context, ops::Rpc::kGetCheckpoint, response,
                 [=, this](auto*) { return checkpoints_->Get(*request); });
  }
  grpc::ServerUnaryReactor* DeleteCheckpoint(Context* context,
                                             const v1::DeleteCheckpointRequest* request,
                                             v1::DeleteCheckpointResponse* response) override {
    return Unary(*context, ops::Rpc::kDeleteCheckpoint, response,
                 [=, this](auto* call) { return checkpoints_->Delete(*request, call); });
  }

  grpc::ServerWriteReactor<v1::ExportCheckpointResponse>* ExportCheckpoint(
      Context* context, const v1::ExportCheckpointRequest* request) override {
    using Rows = v1::ExportCheckpointResponse;
    using Stream = PulledStream<Rows>;
    const auto open = [=, this](rpc::CallContext*) -> absl::StatusOr<Stream::Next> {
      ASSIGN_OR_RETURN(std::shared_ptr<CheckpointExport> rows, checkpoints_->StartExport(*request));
      return [rows]() -> absl::StatusOr<std::optional<Rows>> {
        ASSIGN_OR_RETURN(Rows part, rows->Next());
        if (part.values().empty()) return std::nullopt;
        return part;
      };
    };
    return Stream::Start(environment_, *context, ops::Rpc::kExportCheckpoint, kLimit, open);
  }

 private:
  // Sends the progress of `call`, and last what it returns.
  template <typename Call>
  ProgressReactor* WithProgress(const Context& context, ops::Rpc rpc, const Call& call) {
    using Stream = ProgressStream<Progress>;
    const auto work = [call](rpc::CallContext* call_context,
                             const Stream::Write& write) -> absl::Status {
      const Checkpoints::Report report = write;
      ASSIGN_OR_RETURN(const Progress last, call(call_context, report));
      return write(last);
    };
    return Stream::Start(environment_, context, rpc, kLimit, work);
  }

  template <typename Response, typename Call>
  grpc::ServerUnaryReactor* Unary(const Context& context, ops::Rpc rpc, Response* response,
                                  const Call& call) {
    const auto work = [call, response](rpc::CallContext* call_context, int64_t*) -> absl::Status {
      ASSIGN_OR_RETURN(*response, call(call_context));
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, context, rpc, 0, work);
  }

  Checkpoints* const checkpoints_;
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment) {
  return std::make_unique<CheckpointServiceImpl>(checkpoints, environment);
}

}  // namespace emberd::server
