#include "server/coordinator/programs/program_service.h"

#include <functional>
#include <utility>

#include <grpcpp/support/byte_buffer.h>

#include "absl/time/time.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/program_service.grpc.pb.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

// Requests are decoded on a worker, where what is no message gets a clear status.
using ProgramStub = v1::ProgramService;
using ProgramServiceBase =
    ProgramStub::WithRawCallbackMethod_Compile<ProgramStub::WithRawCallbackMethod_Release<
        ProgramStub::WithRawCallbackMethod_PrepareBatch<ProgramStub::WithRawCallbackMethod_Execute<
            ProgramStub::WithRawCallbackMethod_ExecuteChained<
                ProgramStub::WithRawCallbackMethod_ReadHandle<ProgramStub::Service>>>>>>;

const char* SampleName(ops::Rpc rpc) {
  switch (rpc) {
    case ops::Rpc::kCompile:
      return "compile";
    case ops::Rpc::kRelease:
      return "release";
    case ops::Rpc::kPrepareBatch:
      return "prepare_batch";
    case ops::Rpc::kExecute:
      return "execute";
    case ops::Rpc::kExecuteChained:
      return "execute_chained";
    default:
      return "read_handle";
  }
}

class ProgramServiceImpl final : public ProgramServiceBase {
 public:
  ProgramServiceImpl(Programs* programs, ops::Samples* samples, const CallEnvironment& environment)
      : programs_(programs), samples_(samples), environment_(environment) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* Compile(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::CompileRequest>(context, ops::Rpc::kCompile, request, response,
                                    &Programs::Compile);
  }
  Reactor* Release(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::ReleaseRequest>(context, ops::Rpc::kRelease, request, response,
                                    &Programs::Release);
  }
  Reactor* PrepareBatch(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::PrepareBatchRequest>(context, ops::Rpc::kPrepareBatch, request, response,
                                         &Programs::PrepareBatch);
  }
  Reactor* Execute(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::ExecuteRequest>(context, ops::Rpc::kExecute, request, response,
                                    &Programs::Execute);
  }
  Reactor* ExecuteChained(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::ExecuteChainedRequest>(context, ops::Rpc::kExecuteChained, request, response,
                                           &Programs::ExecuteChained);
  }
  Reactor* ReadHandle(Context* context, const Bytes* request, Bytes* response) override {
    return Call<v1::ReadHandleRequest>(context, ops::Rpc::kReadHandle, request, response,
                                       &Programs::ReadHandle);
  }

 private:
  template <typename Request, typename Method>
  Reactor* Call(Context* context, ops::Rpc rpc, const Bytes* request, Bytes* response,
                Method method) {
    auto work = [this, rpc, request, response, method](rpc::CallContext* call,
                                                       int64_t* response_bytes) -> absl::Status {
      const absl::Time began = SteadyNow();
      Request message;
      RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
      ASSIGN_OR_RETURN(const auto result, std::invoke(method, programs_, std::move(message), call));
      {
        ops::StageTimer timer(programs_->metrics(), ops::Stage::kEncode);
        *response = rpc::EncodeMessage(result);
      }
      *response_bytes = static_cast<int64_t>(response->Length());
      samples_->Add(SampleName(rpc), absl::ToDoubleSeconds(SteadyNow() - began));
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, *context, rpc, static_cast<int64_t>(request->Length()),
                             std::move(work));
  }

  Programs* const programs_;
  ops::Samples* const samples_;
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment) {
  return std::make_unique<ProgramServiceImpl>(programs, samples, environment);
}

}  // namespace emberd::server
