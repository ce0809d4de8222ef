#include "server/coordinator/embedding_service.h"

#include <memory>
#include <utility>

#include <grpcpp/impl/codegen/proto_utils.h>

#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/export_stream.h"
#include "server/coordinator/lookup_response.h"
#include "server/rpc/status_codes.h"

namespace emberd::server {
namespace {

// Lookup answers with hand-made bytes, so that activations are not copied; all others with
// messages.
using ServiceBase = v1::EmbeddingService::WithRawCallbackMethod_Lookup<
    v1::EmbeddingService::WithCallbackMethod_DeclareModel<
        v1::EmbeddingService::WithCallbackMethod_DescribeModel<
            v1::EmbeddingService::WithCallbackMethod_ApplyGradients<
                v1::EmbeddingService::WithCallbackMethod_ReleaseBatch<
                    v1::EmbeddingService::WithCallbackMethod_ReadRows<
                        v1::EmbeddingService::WithCallbackMethod_AssignRows<
                            v1::EmbeddingService::WithCallbackMethod_ExportTable<
                                v1::EmbeddingService::Service>>>>>>>>;

class EmbeddingServiceImpl final : public ServiceBase {
 public:
  EmbeddingServiceImpl(Coordinator* coordinator, const CallEnvironment& environment)
      : coordinator_(coordinator), environment_(environment) {}

  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override {
    auto work = [this, request, response](rpc::CallContext* call,
                                          int64_t* response_bytes) -> absl::Status {
      v1::LookupRequest message;
      grpc::ByteBuffer bytes(*request);  // deserializing empties its argument
      if (!grpc::SerializationTraits<v1::LookupRequest>::Deserialize(&bytes, &message).ok()) {
        return absl::InvalidArgumentError("the request is no emberd.v1.LookupRequest");
      }
      auto output = coordinator_->Lookup(message, call);
      if (!output.ok()) return output.status();
      ops::StageTimer timer(coordinator_->metrics(), ops::Stage::kEncode);
      *response = EncodeLookupResponse(*output);
      *response_bytes = static_cast<int64_t>(response->Length());
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kLookup,
                             static_cast<int64_t>(request->Length()), std::move(work));
  }

  grpc::ServerUnaryReactor* DeclareModel(grpc::CallbackServerContext* context,
                                         const v1::DeclareModelRequest* request,
                                         v1::DeclareModelResponse* response) override {
    return Call(context, ops::Rpc::kDeclareModel, request, response, &Coordinator::DeclareModel);
  }
  grpc::ServerUnaryReactor* DescribeModel(grpc::CallbackServerContext* context,
                                          const v1::DescribeModelRequest* request,
                                          v1::DescribeModelResponse* response) override {
    return Call(context, ops::Rpc::kDescribeModel, request, response, &Coordinator::DescribeModel);
  }
  grpc::ServerUnaryReactor* ApplyGradients(grpc::CallbackServerContext* context,
                                           const v1::ApplyGradientsRequest* request,
                                           v1::ApplyGradientsResponse* response) override {
    return Call(context, ops::Rpc::kApplyGradients, request, response,
                &Coordinator::ApplyGradients);
  }
  grpc::ServerUnaryReactor* ReleaseBatch(grpc::CallbackServerContext* context,
                                         const v1::ReleaseBatchRequest* request,
                                         v1::ReleaseBatchResponse* response) override {
    return Call(context, ops::Rpc::kReleaseBatch, request, response, &Coordinator::ReleaseBatch);
  }
  grpc::ServerUnaryReactor* ReadRows(grpc::CallbackServerContext* context,
                                     const v1::ReadRowsRequest* request,
                                     v1::ReadRowsResponse* response) override {
    return Call(context, ops::Rpc::kReadRows, request, response, &Coordinator::ReadRows);
  }
  grpc::ServerUnaryReactor* AssignRows(grpc::CallbackServerContext* context,
                                       const v1::AssignRowsRequest* request,
                                       v1::AssignRowsResponse* response) override {
    return Call(context, ops::Rpc::kAssignRows, request, response, &Coordinator::AssignRows);
  }
  grpc::ServerWriteReactor<v1::ExportTableResponse>* ExportTable(
      grpc::CallbackServerContext* context, const v1::ExportTableRequest* request) override {
    return ExportStream::Start(coordinator_, environment_, *context, *request);
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Call(
      grpc::CallbackServerContext* context, ops::Rpc rpc, const Request* request,
      Response* response,
      absl::StatusOr<Response> (Coordinator::*method)(const Request&, rpc::CallContext*)) {
    auto work = [this, request, response, method](rpc::CallContext* call, int64_t* response_bytes) {
      absl::StatusOr<Response> result = (coordinator_->*method)(*request, call);
      if (!result.ok()) return result.status();
      *response = *std::move(result);
      *response_bytes = static_cast<int64_t>(response->ByteSizeLong());
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, *context, rpc,
                             static_cast<int64_t>(request->ByteSizeLong()), std::move(work));
  }

  Coordinator* const coordinator_;
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator,
                                                    const CallEnvironment& environment) {
  return std::make_unique<EmbeddingServiceImpl>(coordinator, environment);
}

}  // namespace emberd::server
