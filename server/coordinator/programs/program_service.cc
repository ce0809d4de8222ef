#include "server/coordinator/programs/program_service.h"

#include "emberd/v1/program_service.grpc.pb.h"
#include "server/coordinator/unary_service.h"

namespace emberd::server {
namespace {

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

}  // namespace

std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment) {
  return std::make_unique<ProgramServiceImpl>(programs, samples, environment);
}

}  // namespace emberd::server
