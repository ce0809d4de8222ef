#include "server/coordinator/services.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "emberd/v1/program_service.grpc.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/coordinator/response_streams.h"
#include "server/coordinator/row_access.h"
#include "server/ops/metrics.h"
#include "server/ops/rpc_names.h"
#include "server/rpc/call_context.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/rpc/spans.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"
#include "server/step/lookup_response.h"

namespace emberd::coordinator {
namespace {

// What the methods of a service have in common.
struct UnaryOptions {
  CallEnvironment environment;
  ops::Metrics* metrics = nullptr;  // hears how long encoding takes; null: nobody does
  ops::Samples* samples = nullptr;  // hears how long each call takes that succeeds; the same
};

// `rpc` is declared in a .proto that this program knows.
const google::protobuf::MethodDescriptor& MethodOf(ops::Rpc rpc) {
  return *google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(absl::StrCat(
      "emberd.v1.", absl::StrReplaceAll(std::string(ops::RpcName(rpc)), {{"/", "."}})));
}

// Where a method of a public service stands in its service.
int MethodIndex(ops::Rpc rpc) { return MethodOf(rpc).index(); }

// Its name among the samples: "execute_chained".
std::string SampleName(ops::Rpc rpc) {
  std::string name;
  for (const char c : MethodOf(rpc).name()) {
    if (absl::ascii_isupper(c) && !name.empty()) name.push_back('_');
    name.push_back(absl::ascii_tolower(c));
  }
  return name;
}

// Unary methods: what each of them needs beside its work stands here, once. Every method takes and
// gives bytes: requests are decoded on a worker, where what is no message gets a clear status
// (gRPC's own decoding would say UNIMPLEMENTED).
//
// `Service` is made by gRPC's compiler: X::Service, with those of its streams that are served
// otherwise. What a subclass serves must outlive it.
template <typename Service>
class UnaryService : public Service {
 protected:
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  explicit UnaryService(const UnaryOptions& options) : options_(options) {}

  // The method answers with encode(work(context, request, call)), which runs on a worker; what
  // `work` returns is a StatusOr.
  template <typename Request, typename Work,
            typename Encode = Bytes (*)(const google::protobuf::Message&)>
  void Serve(ops::Rpc rpc, const Work& work, Encode encode = &rpc::EncodeMessage) {
    const auto start = [this, rpc, work, encode](const Context* context, const Bytes* request,
                                                 Bytes* response) {
      auto run = [=, this](rpc::CallContext* call, int64_t* response_bytes) -> absl::Status {
        const absl::Time began = SteadyNow();
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
        ASSIGN_OR_RETURN(const auto result, work(*context, std::move(message), call));
        std::optional<ops::StageTimer> timer;
        if (options_.metrics != nullptr) timer.emplace(options_.metrics, ops::Stage::kEncode);
        *response = encode(result);
        timer.reset();
        *response_bytes = static_cast<int64_t>(response->Length());
        if (options_.samples == nullptr) return absl::OkStatus();
        options_.samples->Add(SampleName(rpc), absl::ToDoubleSeconds(SteadyNow() - began));
        return absl::OkStatus();
      };
      return PooledCall::Start(options_.environment, *context, rpc,
                               static_cast<int64_t>(request->Length()), std::move(run));
    };
    this->MarkMethodRawCallback(MethodIndex(rpc),
                                new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(start));
  }

  // The method is one of `target`.
  template <typename Target, typename Request, typename Result>
  void Serve(ops::Rpc rpc, Target* target,
             absl::StatusOr<Result> (Target::*method)(Request, rpc::CallContext*)) {
    using Message = std::decay_t<Request>;
    Serve<Message>(rpc,
                   [target, method](const Context&, Message&& request, rpc::CallContext* call) {
                     return (target->*method)(std::move(request), call);
                   });
  }

  const CallEnvironment& environment() const { return options_.environment; }

 private:
  const UnaryOptions options_;
};

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
        &step::EncodeLookupResponse);
    Serve<v1::ShareMemoryRequest>(
        ops::Rpc::kShareMemory,
        [regions = coordinator->regions(), lanes](const Context& context, const auto&, auto*) {
          return rpc::InvitePeer(regions, lanes, rpc::LanePeerOf(context));
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

// How long a call of CheckpointService may take where its caller sets no deadline: large tables
// take hours.
constexpr absl::Duration kCheckpointLimit = absl::Hours(24);

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
    return Stream::Start(environment(), *context, ops::Rpc::kExportCheckpoint, kCheckpointLimit,
                         open);
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
    return Stream::Start(environment(), context, rpc, kCheckpointLimit, work);
  }

  Checkpoints* const checkpoints_;
};

class ProgramServiceImpl final : public UnaryService<v1::ProgramService::Service> {
 public:
  ProgramServiceImpl(Programs* programs, ops::Samples* samples, const CallEnvironment& environment)
      : UnaryService(
            {.environment = environment, .metrics = programs->metrics(), .samples = samples}) {
    Serve(ops::Rpc::kCompile, programs, &Programs::Compile);
    Serve(ops::Rpc::kRelease, programs, &Programs::Release);
    Serve(ops::Rpc::kPrepareBatch, programs, &Programs::PrepareBatch);
    Serve(ops::Rpc::kExecute, programs, &Programs::Execute);
    Serve(ops::Rpc::kExecuteChained, programs, &Programs::ExecuteChained);
    Serve(ops::Rpc::kReadHandle, programs, &Programs::ReadHandle);
  }
};

class AdminServiceImpl final : public UnaryService<v1::AdminService::Service> {
 public:
  AdminServiceImpl(Administration* administration, Coordinator* coordinator,
                   const CallEnvironment& environment)
      : UnaryService({.environment = environment}) {
    Serve(ops::Rpc::kGetStatus, administration, &Administration::GetStatus);
    Serve(ops::Rpc::kGetLimits, coordinator, &Coordinator::GetLimits);
    Serve(ops::Rpc::kSetLimits, coordinator, &Coordinator::SetLimits);
    Serve(ops::Rpc::kGetMetrics, administration, &Administration::GetMetrics);
    Serve(ops::Rpc::kGetStats, administration, &Administration::GetStats);
    Serve(ops::Rpc::kDrain, administration, &Administration::Drain);
    Serve(ops::Rpc::kDropModel, coordinator, &Coordinator::DropModel);
    Serve(ops::Rpc::kResetModel, coordinator, &Coordinator::ResetModel);
    Serve(ops::Rpc::kDropGroup, coordinator, &Coordinator::DropGroup);
    Serve(ops::Rpc::kChangeMemory, coordinator, &Coordinator::ChangeMemory);
  }
};

constexpr absl::string_view kLookupMethod = "/emberd.v1.EmbeddingService/Lookup";

// One Lookup that came over a lane.
class LaneLookup {
 public:
  LaneLookup(Coordinator* coordinator, const CallEnvironment& environment, LaneCall* call)
      : coordinator_(coordinator),
        environment_(environment),
        call_(call),
        context_(rpc::DeadlineOf(*call, environment.default_deadline),
                 rpc::TraceOf(call->request().trace)),
        span_(&context_, ops::RpcName(kRpc), rpc::Span::Kind::kServer,
              rpc::IsTrace(call->request().trace), began_),
        timer_(environment.metrics, kRpc, request_bytes()) {
    environment.metrics->Add(ops::MetricId::kLaneCalls);
    context_.SetRoomMaker(
        [this](int64_t bytes, absl::string_view what) { return MakeRoom(bytes, what); });
    call->OnCancel([this] { context_.Cancel(); });
  }

  LaneAnswer Run() {
    LaneAnswer answer;
    answer.status = LookUp(&answer);
    call_->OnCancel(nullptr);
    if (answer.status.ok()) timer_.AddResponseBytes(static_cast<int64_t>(answer.body.size()));
    LogSlowCall(environment_, kRpc, answer.status, SteadyNow() - began_, context_.trace());
    span_.End(answer.status);
    timer_.Finish(answer.status.code());
    return answer;
  }

 private:
  static constexpr ops::Rpc kRpc = ops::Rpc::kLookup;

  int64_t request_bytes() const { return static_cast<int64_t>(call_->request().body.size()); }

  absl::Status LookUp(LaneAnswer* answer) {
    const absl::string_view authorization = call_->request().authorization;
    ASSIGN_OR_RETURN(
        grant_, environment_.admission->Admit(
                    security::ClientName(authorization, call_->peer().address), request_bytes()));
    // After it has been counted, as for a PooledCall.
    if (environment_.drain->draining()) return DrainingError();
    rpc::ArenaMessage<v1::LookupRequest> arena_request;
    v1::LookupRequest& request = *arena_request;
    const absl::string_view body = call_->request().body;
    if (!request.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
      return absl::InvalidArgumentError("the request is not a valid emberd.v1.LookupRequest");
    }
    ASSIGN_OR_RETURN(const step::LookupOutput output,
                     security::MayTrain(authorization)
                         ? coordinator_->Lookup(request, &context_)
                         : coordinator_->LookupForReader(request, &context_));
    ops::StageTimer timer(coordinator_->metrics(), ops::Stage::kEncode);
    answer->body = step::EncodeLookupText(output);
    answer->elsewhere = answer->body.size() > kMaxBody;
    // The trainer asks again over gRPC, and so never learns the handle of this batch.
    if (answer->elsewhere && output.batch_handle != 0) {
      coordinator_->resources().path->Discard(request.model_id(), output.batch_handle);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<rpc::CallContext::Room> MakeRoom(int64_t bytes, absl::string_view what) {
    ASSIGN_OR_RETURN(rpc::CallContext::Room room, grant_.Reserve(bytes, what));
    rooms_.push_back(room);
    return room;
  }

  // What fits in a packet beside the few bytes before it.
  static constexpr size_t kMaxBody = lanes::kMaxPacketBytes - 256;

  Coordinator* const coordinator_;
  const CallEnvironment& environment_;
  LaneCall* const call_;
  const absl::Time began_ = SteadyNow();
  rpc::CallContext context_;
  rpc::Span span_;
  ops::RpcTimer timer_;
  rpc::Admission::Grant grant_;
  std::vector<rpc::CallContext::Room> rooms_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LaneServer* lanes,
                                                    const CallEnvironment& environment) {
  return std::make_unique<EmbeddingServiceImpl>(coordinator, streams, lanes, environment);
}

std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment) {
  return std::make_unique<CheckpointServiceImpl>(checkpoints, environment);
}

std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment) {
  return std::make_unique<ProgramServiceImpl>(programs, samples, environment);
}

std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                Coordinator* coordinator,
                                                const CallEnvironment& environment) {
  return std::make_unique<AdminServiceImpl>(administration, coordinator, environment);
}

LaneServer::Handler MakeLookupHandler(Coordinator* coordinator, const CallEnvironment& environment,
                                      const security::Security* security) {
  return [coordinator, environment, security](LaneCall* call) -> LaneAnswer {
    if (call->request().method != v1::LOOKUP) return {.status = rpc::UnknownLaneMethod(*call)};
    absl::Status refused = rpc::CheckLaneCall(security, kLookupMethod, *call);
    if (!refused.ok()) return {.status = std::move(refused)};
    return LaneLookup(coordinator, environment, call).Run();
  };
}

}  // namespace emberd::coordinator
