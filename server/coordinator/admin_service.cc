#include <memory>

#include "emberd/v1/admin_service.grpc.pb.h"
#include "server/coordinator/embedding_service.h"

namespace emberd::server {
namespace {

class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  AdminServiceImpl(Administration* administration, const CallEnvironment& environment)
      : administration_(administration), environment_(environment) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    auto work = [this, response](rpc::CallContext* call, int64_t*) {
      *response = administration_->GetStatus(call);
      return absl::OkStatus();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kGetStatus, 0, work);
  }

  grpc::ServerUnaryReactor* GetLimits(grpc::CallbackServerContext* context,
                                      const v1::GetLimitsRequest* request,
                                      v1::GetLimitsResponse* response) override {
    auto work = [this, request, response](rpc::CallContext* call, int64_t*) {
      auto limits = administration_->GetLimits(*request, call);
      if (limits.ok()) *response = std::move(*limits);
      return limits.status();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kGetLimits, 0, work);
  }

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetStatsRequest* request,
                                     v1::GetStatsResponse* response) override {
    auto work = [this, request, response](rpc::CallContext* call, int64_t*) {
      auto stats = administration_->GetStats(*request, call);
      if (stats.ok()) *response = std::move(*stats);
      return stats.status();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kGetStats, 0, work);
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override {
    auto work = [this, request, response](rpc::CallContext*, int64_t*) {
      auto left = administration_->Drain(*request);
      if (left.ok()) *response = std::move(*left);
      return left.status();
    };
    return PooledCall::Start(environment_, *context, ops::Rpc::kDrain, 0, work);
  }

 private:
  Administration* const administration_;
  const CallEnvironment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                const CallEnvironment& environment) {
  return std::make_unique<AdminServiceImpl>(administration, environment);
}

}  // namespace emberd::server
