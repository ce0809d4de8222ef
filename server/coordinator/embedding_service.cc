#include "server/coordinator/embedding_service.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "base/status.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/lookup_response.h"
#include "server/coordinator/pulled_stream.h"
#include "server/coordinator/row_access.h"
#include "server/rpc/call_context.h"
#include "server/rpc/lanes.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {
namespace {

// Every method takes and gives bytes: requests are decoded on a worker, where what is no message
// gets a clear status (gRPC's own decoding would say UNIMPLEMENTED), and Lookup's answer is made by
// hand, so that activations are not copied.
using Service = v1::EmbeddingService;
using ServiceBase = Service::WithRawCallbackMethod_DeclareModel<
    Service::WithRawCallbackMethod_DescribeModel<Service::WithRawCallbackMethod_Lookup<
        Service::WithRawCallbackMethod_ApplyGradients<Service::WithRawCallbackMethod_ReleaseBatch<
            Service::WithRawCallbackMethod_ReadRows<Service::WithRawCallbackMethod_AssignRows<
                Service::WithRawCallbackMethod_ExportTable<Service::WithRawCallbackMethod_Train<
                    Service::WithRawCallbackMethod_ShareMemory<Service::Service>>>>>>>>>>;

class EmbeddingServiceImpl final : public ServiceBase {
 public:
  EmbeddingServiceImpl(Coordinator* coordinator, TrainStreams* streams, LaneServer* lanes,
                       const CallEnvironment& environment)
      : coordinator_(coordinator), streams_(streams), lanes_(lanes), environment_(environment) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* DeclareModel(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kDeclareModel, request, response, &Coordinator::DeclareModel);
  }
  Reactor* DescribeModel(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kDescribeModel, request, response, &Coordinator::DescribeModel);
  }
  Reactor* Lookup(Context* context, const Bytes* request, Bytes* response) override {
    return Call(
        context, ops::Rpc::kLookup, request, response,
        security::MayTrain(*context) ? &Coordinator::Lookup : &Coordinator::LookupForReader);
  }
  Reactor* ApplyGradients(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kApplyGradients, request, response,
                &Coordinator::ApplyGradients);
  }
  Reactor* ReleaseBatch(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kReleaseBatch, request, response, &Coordinator::ReleaseBatch);
  }
  Reactor* ReadRows(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kReadRows, request, response, &Coordinator::ReadRows);
  }
  Reactor* AssignRows(Context* context, const Bytes* request, Bytes* response) override {
    return Call(context, ops::Rpc::kAssignRows, request, response, &Coordinator::AssignRows);
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
    return Stream::Start(environment_, *context, ops::Rpc::kExportTable,
                         environment_.default_deadline, open);
  }
  Reactor* ShareMemory(Context* context, const Bytes* request, Bytes* response) override {
    auto work = [this, peer = rpc::LanePeerOf(*context), request, response](
                    rpc::CallContext* call, int64_t*) -> absl::Status {
      v1::ShareMemoryRequest message;
      RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
      auto result = coordinator_->ShareMemory(message, call);
      rpc::InviteToLane(lanes_, peer, &result);
      if (result.ok()) *response = Encode(*result);
      return result.status();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kShareMemory,
                             static_cast<int64_t>(request->Length()), std::move(work));
  }
  grpc::ServerBidiReactor<Bytes, Bytes>* Train(Context* context) override {
    return streams_->Start(*context);
  }

 private:
  template <typename Request, typename Result>
  Reactor* Call(Context* context, ops::Rpc rpc, const Bytes* request, Bytes* response,
                absl::StatusOr<Result> (Coordinator::*method)(const Request&, rpc::CallContext*)) {
    auto work = [coordinator = coordinator_, request, response, method](
                    rpc::CallContext* call, int64_t* response_bytes) -> absl::Status {
      rpc::CallContext::Room room;
      // Of others, ids and gradients are small beside what is made of them.
      if constexpr (std::is_same_v<Request, v1::ReadRowsRequest> ||
                    std::is_same_v<Request, v1::AssignRowsRequest>) {
        ASSIGN_OR_RETURN(
            room, call->MakeRoom(static_cast<int64_t>(request->Length()), "the decoded request"));
      }
      Request message;
      RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
      ASSIGN_OR_RETURN(Result result, std::invoke(method, coordinator, message, call));
      ops::StageTimer timer(coordinator->metrics(), ops::Stage::kEncode);
      *response = Encode(result);
      *response_bytes = static_cast<int64_t>(response->Length());
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, *context, rpc, static_cast<int64_t>(request->Length()),
                             std::move(work));
  }

  static Bytes Encode(const LookupOutput& output) { return EncodeLookupResponse(output); }
  static Bytes Encode(const google::protobuf::Message& message) {
    return rpc::EncodeMessage(message);
  }

  Coordinator* const coordinator_;
  TrainStreams* const streams_;
  LaneServer* const lanes_;
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LaneServer* lanes,
                                                    const CallEnvironment& environment) {
  return std::make_unique<EmbeddingServiceImpl>(coordinator, streams, lanes, environment);
}

}  // namespace emberd::server
