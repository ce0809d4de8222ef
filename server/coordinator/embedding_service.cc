#include "server/coordinator/embedding_service.h"

#include <memory>
#include <optional>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "base/status.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/lookup_response.h"
#include "server/coordinator/pulled_stream.h"
#include "server/coordinator/row_access.h"
#include "server/coordinator/unary_service.h"
#include "server/rpc/call_context.h"
#include "server/rpc/lanes.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {
namespace {

using EmbeddingStub = v1::EmbeddingService;
using EmbeddingStreams = EmbeddingStub::WithRawCallbackMethod_ExportTable<
    EmbeddingStub::WithRawCallbackMethod_Train<EmbeddingStub::Service>>;

class EmbeddingServiceImpl final : public UnaryService<EmbeddingStreams> {
 public:
  EmbeddingServiceImpl(Coordinator* coordinator, TrainStreams* streams, LaneServer* lanes,
                       const CallEnvironment& environment)
      : UnaryService({.environment = environment, .metrics = coordinator->metrics()}),
        coordinator_(coordinator),
        streams_(streams) {
    Serve(ops::Rpc::kDeclareModel, coordinator, &Coordinator::DeclareModel);
    Serve(ops::Rpc::kDescribeModel, coordinator, &Coordinator::DescribeModel);
    Serve(ops::Rpc::kApplyGradients, coordinator, &Coordinator::ApplyGradients);
    Serve(ops::Rpc::kReleaseBatch, coordinator, &Coordinator::ReleaseBatch);
    Serve(ops::Rpc::kReadRows, coordinator, &Coordinator::ReadRows);
    Serve(ops::Rpc::kAssignRows, coordinator, &Coordinator::AssignRows);
    // The answer is made by hand, so that activations are not copied.
    Serve<v1::LookupRequest>(
        ops::Rpc::kLookup,
        [coordinator](const Context& context, const v1::LookupRequest& request,
                      rpc::CallContext* call) {
          return security::MayTrain(context) ? coordinator->Lookup(request, call)
                                             : coordinator->LookupForReader(request, call);
        },
        &EncodeLookupResponse);
    Serve<v1::ShareMemoryRequest>(
        ops::Rpc::kShareMemory,
        [coordinator, lanes](const Context& context, const v1::ShareMemoryRequest& request,
                             rpc::CallContext* call) {
          auto result = coordinator->ShareMemory(request, call);
          rpc::InviteToLane(lanes, rpc::LanePeerOf(context), &result);
          return result;
        });
  }

  grpc::ServerWriteReactor<Bytes>* ExportTable(Context* context, const Bytes* request) override {
    using Stream = PulledStream<Bytes>;
    const auto open = [coordinator = coordinator_,
                       request = *request](rpc::CallContext* call) -> absl::StatusOr<Stream::Next> {
      v1::ExportTableRequest message;
      RETURN_IF_ERROR(rpc::DecodeMessage(request, &message));
      ASSIGN_OR_RETURN(std::shared_ptr<Coordinator::Export> rows,
                       coordinator->StartExport(message, call));
      return [rows]() -> absl::StatusOr<std::optional<Bytes>> {
        ASSIGN_OR_RETURN(const v1::ExportTableResponse part, rows->Next());
        if (!part.has_values()) return std::nullopt;
        return rpc::EncodeMessage(part);
      };
    };
    return Stream::Start(environment(), *context, ops::Rpc::kExportTable,
                         environment().default_deadline, open);
  }
  grpc::ServerBidiReactor<Bytes, Bytes>* Train(Context* context) override {
    return streams_->Start(*context);
  }

 private:
  Coordinator* const coordinator_;
  TrainStreams* const streams_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LaneServer* lanes,
                                                    const CallEnvironment& environment) {
  return std::make_unique<EmbeddingServiceImpl>(coordinator, streams, lanes, environment);
}

}  // namespace emberd::server
