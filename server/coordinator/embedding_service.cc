#include "server/coordinator/embedding_service.h"

#include <functional>
#include <memory>
#include <utility>

#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/export_stream.h"
#include "server/coordinator/lookup_response.h"
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
                Service::WithRawCallbackMethod_ExportTable<
                    Service::WithRawCallbackMethod_Train<Service::Service>>>>>>>>>;

class EmbeddingServiceImpl final : public ServiceBase {
 public:
  EmbeddingServiceImpl(Coordinator* coordinator, TrainStreams* streams,
                       const CallEnvironment& environment)
      : coordinator_(coordinator), streams_(streams), environment_(environment) {}

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
    return ExportStream::Start(coordinator_, environment_, *context, *request);
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
      Request message;
      if (absl::Status status = rpc::DecodeMessage(*request, &message); !status.ok()) return status;
      absl::StatusOr<Result> result = std::invoke(method, coordinator, message, call);
      if (!result.ok()) return result.status();
      ops::StageTimer timer(coordinator->metrics(), ops::Stage::kEncode);
      *response = Encode(*result);
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
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    const CallEnvironment& environment) {
  return std::make_unique<EmbeddingServiceImpl>(coordinator, streams, environment);
}

}  // namespace emberd::server
