#include "server/coordinator/embedding_service.h"

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "base/status.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "server/coordinator/lookup_response.h"
#include "server/coordinator/row_access.h"
#include "server/rpc/call_context.h"
#include "server/rpc/lanes.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {
namespace {

// One ExportTable call: its messages are made on the pool, the next one when the caller has taken
// the last, so that a slow reader costs one message. Deletes itself when the call is over.
class ExportStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  static ExportStream* Start(Coordinator* coordinator, const CallEnvironment& environment,
                             const grpc::CallbackServerContext& server_context,
                             const grpc::ByteBuffer& request);

 private:
  ExportStream(Coordinator* coordinator, const CallEnvironment& environment,
               const grpc::CallbackServerContext& server_context, const grpc::ByteBuffer& request);

  absl::Status Admit(const std::string& client);
  void SubmitNext();
  void MakeNext();
  void End(const absl::Status& status);
  void OnWriteDone(bool ok) override;
  void OnCancel() override { context_.Cancel(); }
  void OnDone() override { delete this; }

  Coordinator* const coordinator_;
  const CallEnvironment environment_;
  const grpc::ByteBuffer request_;
  rpc::CallContext context_;
  ops::RpcTimer timer_;
  Admission::Grant grant_;
  // Messages are made and written one after another: these are touched by one thread at a time.
  std::unique_ptr<Coordinator::Export> export_;
  grpc::ByteBuffer message_;
};

ExportStream::ExportStream(Coordinator* coordinator, const CallEnvironment& environment,
                           const grpc::CallbackServerContext& server_context,
                           const grpc::ByteBuffer& request)
    : coordinator_(coordinator),
      environment_(environment),
      request_(request),
      context_(DeadlineOf(server_context, environment.default_deadline),
               rpc::TraceOf(server_context)),
      timer_(environment.metrics, ops::Rpc::kExportTable) {}

ExportStream* ExportStream::Start(Coordinator* coordinator, const CallEnvironment& environment,
                                  const grpc::CallbackServerContext& server_context,
                                  const grpc::ByteBuffer& request) {
  auto* stream = new ExportStream(coordinator, environment, server_context, request);
  absl::Status status = stream->Admit(security::ClientName(server_context));
  if (status.ok()) {
    stream->SubmitNext();
  } else {
    stream->End(status);
  }
  return stream;
}

absl::Status ExportStream::Admit(const std::string& client) {
  ASSIGN_OR_RETURN(auto grant, environment_.admission->Admit(client, 0));
  grant_ = std::move(grant);
  return environment_.drain->draining() ? DrainingError() : absl::OkStatus();
}

void ExportStream::SubmitNext() {
  if (environment_.queue->Submit([this] { MakeNext(); })) return;
  End(QueueFullError(environment_));
}

void ExportStream::MakeNext() {
  if (export_ == nullptr) {
    v1::ExportTableRequest request;
    if (absl::Status status = rpc::DecodeMessage(request_, &request); !status.ok()) {
      End(status);
      return;
    }
    auto started = coordinator_->StartExport(request, &context_);
    if (!started.ok()) {
      End(started.status());
      return;
    }
    export_ = *std::move(started);
  }
  auto message = export_->Next();
  if (!message.ok() || !message->has_values()) {
    End(message.status());
    return;
  }
  message_ = rpc::EncodeMessage(*message);
  timer_.AddResponseBytes(static_cast<int64_t>(message_.Length()));
  StartWrite(&message_);
}

void ExportStream::OnWriteDone(bool ok) {
  if (ok) {
    SubmitNext();
  } else {
    End(absl::CancelledError("the caller is gone"));
  }
}

void ExportStream::End(const absl::Status& status) {
  timer_.Finish(status.code());
  grant_ = Admission::Grant();
  Finish(rpc::ToGrpcStatus(status));
}

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
    return ExportStream::Start(coordinator_, environment_, *context, *request);
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
