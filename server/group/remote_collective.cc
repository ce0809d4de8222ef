#include "server/group/remote_collective.h"

#include <utility>

#include <grpcpp/client_context.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "emberd/internal/v1/collective_service.grpc.pb.h"
#include "server/group/watch_callback.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

constexpr absl::Duration kLeaveDeadline = absl::Seconds(1);

// A request with the fields that all of them have.
template <typename Request>
Request MakeRequest(const GroupId& id) {
  Request request;
  request.mutable_name()->set_model_id(id.model_id);
  request.mutable_name()->set_group(id.group);
  return request;
}

absl::Status Status(const grpc::Status& status, const std::string& host) {
  absl::Status result = rpc::FromGrpcStatus(status);
  if (result.ok() || absl::StartsWith(result.message(), "group ")) return result;
  return Annotate(result, host);
}

class RemoteWatch final : public GenerationWatch {
 public:
  RemoteWatch(pb::CollectiveService::Stub* stub, const GroupId& id, uint64_t generation,
              const std::string& host, std::function<void(absl::Status)> ended)
      : call_(std::make_shared<Call>(std::move(ended))) {
    call_->request = MakeRequest<pb::WatchRequest>(id);
    call_->request.set_generation(generation);
    stub->async()->Watch(
        &call_->context, &call_->request, &call_->response,
        [call = call_, host](const grpc::Status& status) {
          const absl::Status end = Status(status, host);
          call->callback.Run(end.ok() ? absl::InternalError("the watch ended without a reason")
                                      : end);
        });
  }
  ~RemoteWatch() override {
    call_->callback.Drop();
    call_->context.TryCancel();
  }

 private:
  // Lives until gRPC has done with it.
  struct Call {
    explicit Call(std::function<void(absl::Status)> ended) : callback(std::move(ended)) {}

    grpc::ClientContext context;
    pb::WatchRequest request;
    pb::WatchResponse response;
    WatchCallback callback;
  };

  const std::shared_ptr<Call> call_;
};

class RemoteCollective final : public Collective {
 public:
  RemoteCollective(const std::shared_ptr<grpc::Channel>& channel, std::string host)
      : host_(std::move(host)), stub_(pb::CollectiveService::NewStub(channel)) {}

  absl::StatusOr<Membership> Join(const GroupId& id, int rank, const v1::GroupOptions& options,
                                  const std::string& coordinator,
                                  rpc::CallContext* context) override {
    auto request = MakeRequest<pb::JoinRequest>(id);
    request.set_rank(rank);
    *request.mutable_options() = options;
    request.set_coordinator(coordinator);
    pb::JoinResponse response;
    const absl::Status status =
        Unary(&pb::CollectiveService::Stub::Join, request, &response, context);
    if (!status.ok()) return status;
    return Membership{response.generation(),
                      {response.coordinators().begin(), response.coordinators().end()}};
  }

  absl::StatusOr<Gathered> AllGather(const GroupId& id, uint64_t generation, int rank,
                                     int group_key, int64_t instance_key, std::string value,
                                     rpc::CallContext* context) override {
    auto request = MakeRequest<pb::AllGatherRequest>(id);
    request.set_generation(generation);
    request.set_rank(rank);
    request.set_group_key(group_key);
    request.set_instance_key(instance_key);
    request.set_value(std::move(value));
    pb::AllGatherResponse response;
    const absl::Status status =
        Unary(&pb::CollectiveService::Stub::AllGather, request, &response, context);
    if (!status.ok()) return status;
    return Gathered{{response.values().begin(), response.values().end()},
                    {response.arrival_us().begin(), response.arrival_us().end()}};
  }

  absl::Status Advance(const GroupId& id, uint64_t generation, int rank, int64_t next_step,
                       int64_t wait_for, rpc::CallContext* context) override {
    auto request = MakeRequest<pb::AdvanceRequest>(id);
    request.set_generation(generation);
    request.set_rank(rank);
    request.set_next_step(next_step);
    request.set_wait_for(wait_for);
    pb::AdvanceResponse response;
    return Unary(&pb::CollectiveService::Stub::Advance, request, &response, context);
  }

  void Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
             bool finished) override {
    auto request = MakeRequest<pb::LeaveRequest>(id);
    request.set_generation(generation);
    request.set_rank(rank);
    request.set_reason(reason);
    request.set_finished(finished);
    pb::LeaveResponse response;
    rpc::CallContext context(absl::Now() + kLeaveDeadline);
    Unary(&pb::CollectiveService::Stub::Leave, request, &response, &context).IgnoreError();
  }

  std::unique_ptr<GenerationWatch> Watch(const GroupId& id, uint64_t generation,
                                         std::function<void(absl::Status)> ended) override {
    return std::make_unique<RemoteWatch>(stub_.get(), id, generation, host_, std::move(ended));
  }

 private:
  template <typename Method, typename Request, typename Response>
  absl::Status Unary(Method method, const Request& request, Response* response,
                     rpc::CallContext* context) {
    grpc::ClientContext client_context;
    client_context.set_deadline(absl::ToChronoTime(context->deadline()));
    rpc::SendTrace(context->trace(), &client_context);
    rpc::CancelWatch watch(context, [&client_context] { client_context.TryCancel(); });
    return Status((stub_.get()->*method)(&client_context, request, response), host_);
  }

  const std::string host_;
  const std::unique_ptr<pb::CollectiveService::Stub> stub_;
};

}  // namespace

std::unique_ptr<Collective> MakeRemoteCollective(const std::shared_ptr<grpc::Channel>& channel,
                                                 std::string host) {
  return std::make_unique<RemoteCollective>(channel, std::move(host));
}

}  // namespace emberd::server
