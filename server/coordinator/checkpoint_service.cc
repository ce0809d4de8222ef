#include "server/coordinator/checkpoint_service.h"

#include <memory>
#include <optional>
#include <utility>

#include "base/status.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "server/coordinator/progress_stream.h"
#include "server/coordinator/pulled_stream.h"
#include "server/coordinator/unary_service.h"

namespace emberd::server {
namespace {

// For callers without a deadline: a checkpoint takes as long as it takes.
constexpr absl::Duration kLimit = absl::Hours(24);

using CheckpointStub = v1::CheckpointService;
using CheckpointStreams = CheckpointStub::WithCallbackMethod_SaveCheckpoint<
    CheckpointStub::WithCallbackMethod_RestoreCheckpoint<
        CheckpointStub::WithCallbackMethod_ServeCheckpoint<
            CheckpointStub::WithCallbackMethod_VerifyCheckpoint<
                CheckpointStub::WithCallbackMethod_MergeCheckpoint<
                    CheckpointStub::WithCallbackMethod_ExportCheckpoint<
                        CheckpointStub::Service>>>>>>;

class CheckpointServiceImpl final : public UnaryService<CheckpointStreams> {
 public:
  CheckpointServiceImpl(Checkpoints* checkpoints, const CallEnvironment& environment)
      : UnaryService({.environment = environment}), checkpoints_(checkpoints) {
    Serve(ops::Rpc::kDiffCheckpoints, checkpoints, &Checkpoints::Diff);
    Serve(ops::Rpc::kListCheckpoints, checkpoints, &Checkpoints::List);
    Serve(ops::Rpc::kGetCheckpoint, checkpoints, &Checkpoints::Get);
    Serve(ops::Rpc::kDeleteCheckpoint, checkpoints, &Checkpoints::Delete);
  }

  using Progress = v1::CheckpointProgress;
  using ProgressReactor = grpc::ServerWriteReactor<Progress>;

  ProgressReactor* SaveCheckpoint(Context* context,
                                  const v1::SaveCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kSaveCheckpoint, *request, &Checkpoints::Save);
  }
  ProgressReactor* RestoreCheckpoint(Context* context,
                                     const v1::RestoreCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kRestoreCheckpoint, *request, &Checkpoints::Restore);
  }
  ProgressReactor* ServeCheckpoint(Context* context,
                                   const v1::ServeCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kServeCheckpoint, *request, &Checkpoints::Serve);
  }
  ProgressReactor* VerifyCheckpoint(Context* context,
                                    const v1::VerifyCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kVerifyCheckpoint, *request, &Checkpoints::Verify);
  }
  ProgressReactor* MergeCheckpoint(Context* context,
                                   const v1::MergeCheckpointRequest* request) override {
    return WithProgress(*context, ops::Rpc::kMergeCheckpoint, *request, &Checkpoints::Merge);
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
    return Stream::Start(environment(), *context, ops::Rpc::kExportCheckpoint, kLimit, open);
  }

 private:
  // Sends the progress of a method, and last what it returns. `request` is there as long as the
  // call.
  template <typename Request>
  ProgressReactor* WithProgress(
      const Context& context, ops::Rpc rpc, const Request& request,
      Checkpoints::Progress (Checkpoints::*method)(const Request&, const Checkpoints::Report&,
                                                   rpc::CallContext*)) {
    using Stream = ProgressStream<Progress>;
    const auto work = [checkpoints = checkpoints_, &request, method](
                          rpc::CallContext* call, const Stream::Write& write) -> absl::Status {
      ASSIGN_OR_RETURN(const Progress last, (checkpoints->*method)(request, write, call));
      return write(last);
    };
    return Stream::Start(environment(), context, rpc, kLimit, work);
  }

  Checkpoints* const checkpoints_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment) {
  return std::make_unique<CheckpointServiceImpl>(checkpoints, environment);
}

}  // namespace emberd::server
