#include "server/group/collective_service.h"

#include <optional>
#include <utility>

#include "emberd/internal/v1/collective_service.grpc.pb.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

namespace pb = internal::v1;

// Every method takes and gives bytes, so that what is no message gets a clear status (gRPC's own
// decoding would say UNIMPLEMENTED).
using Service = pb::CollectiveService;
using ServiceBase = Service::WithRawCallbackMethod_Join<Service::WithRawCallbackMethod_AllGather<
    Service::WithRawCallbackMethod_Advance<Service::WithRawCallbackMethod_Leave<
        Service::WithRawCallbackMethod_Watch<Service::Service>>>>>;

GroupId IdOf(const pb::GroupName& name) { return {name.model_id(), name.group()}; }

// One call, which may wait for others. Deletes itself when it is over.
class CollectiveCall final : public grpc::ServerUnaryReactor {
 public:
  CollectiveCall(Rendezvous* rendezvous, grpc::ByteBuffer* response)
      : rendezvous_(rendezvous), response_(response) {}

  void CountAs(ops::ServerMetrics* metrics, ops::Rpc rpc, size_t request_bytes) {
    timer_.emplace(metrics, rpc, static_cast<int64_t>(request_bytes));
  }
  // What to withdraw when the caller goes away. Before the handler returns, since gRPC tells of
  // that only afterwards.
  void Started(Rendezvous::Call call) { call_ = std::move(call); }

  void Answer(const absl::Status& status, const google::protobuf::Message& response) {
    if (status.ok()) *response_ = rpc::EncodeMessage(response);
    if (timer_.has_value()) {
      timer_->AddResponseBytes(static_cast<int64_t>(response_->Length()));
      timer_->Finish(status.code());
    }
    Finish(rpc::ToGrpcStatus(status));
  }

 private:
  void OnCancel() override {
    rendezvous_->Withdraw(call_, absl::CancelledError("the caller went away"));
  }
  void OnDone() override { delete this; }

  Rendezvous* const rendezvous_;
  grpc::ByteBuffer* const response_;
  std::optional<ops::RpcTimer> timer_;
  Rendezvous::Call call_;
};

class CollectiveServiceImpl final : public ServiceBase {
 public:
  CollectiveServiceImpl(Rendezvous* rendezvous, ops::ServerMetrics* metrics)
      : rendezvous_(rendezvous), metrics_(metrics) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* Join(Context*, const Bytes* bytes, Bytes* response) override {
    return Start<pb::JoinRequest>(
        ops::Rpc::kCollectiveJoin, *bytes, response,
        [this](const pb::JoinRequest& request, CollectiveCall* call) {
          return rendezvous_->Join(
              IdOf(request.name()), request.rank(), request.options(), request.coordinator(),
              [call](const absl::StatusOr<Membership>& membership) {
                pb::JoinResponse answer;
                if (membership.ok()) {
                  answer.set_generation(membership->generation);
                  answer.mutable_coordinators()->Assign(membership->coordinators.begin(),
                                                        membership->coordinators.end());
                }
                call->Answer(membership.status(), answer);
              });
        });
  }

  Reactor* AllGather(Context*, const Bytes* bytes, Bytes* response) override {
    return Start<pb::AllGatherRequest>(
        ops::Rpc::kCollectiveAllGather, *bytes, response,
        [this](pb::AllGatherRequest& request, CollectiveCall* call) {
          return rendezvous_->AllGather(
              IdOf(request.name()),
              {request.generation(),
               request.rank(),
               {request.instance_key(), request.group_key()},
               std::move(*request.mutable_value())},
              [call](const absl::StatusOr<Gathered>& gathered) {
                pb::AllGatherResponse answer;
                if (gathered.ok()) {
                  answer.mutable_values()->Assign(gathered->values.begin(), gathered->values.end());
                  answer.mutable_arrival_us()->Assign(gathered->arrival_us.begin(),
                                                      gathered->arrival_us.end());
                }
                call->Answer(gathered.status(), answer);
              });
        });
  }

  Reactor* Advance(Context*, const Bytes* bytes, Bytes* response) override {
    return Start<pb::AdvanceRequest>(
        ops::Rpc::kCollectiveAdvance, *bytes, response,
        [this](const pb::AdvanceRequest& request, CollectiveCall* call) {
          return rendezvous_->Advance(
              IdOf(request.name()),
              {request.generation(), request.rank(), request.next_step(), request.wait_for()},
              [call](const absl::Status& status) { call->Answer(status, pb::AdvanceResponse()); });
        });
  }

  Reactor* Leave(Context*, const Bytes* bytes, Bytes* response) override {
    return Start<pb::LeaveRequest>(
        ops::Rpc::kCollectiveLeave, *bytes, response,
        [this](const pb::LeaveRequest& request, CollectiveCall* call) {
          call->Answer(rendezvous_->Leave(IdOf(request.name()), request.generation(),
                                          request.rank(), request.reason(), request.finished()),
                       pb::LeaveResponse());
          return Rendezvous::Call();
        });
  }

  // Not counted: it takes as long as its generation lives.
  Reactor* Watch(Context*, const Bytes* bytes, Bytes* response) override {
    return Start<pb::WatchRequest>(
        std::nullopt, *bytes, response,
        [this](const pb::WatchRequest& request, CollectiveCall* call) {
          return rendezvous_->Watch(
              IdOf(request.name()), request.generation(),
              [call](const absl::Status& status) { call->Answer(status, pb::WatchResponse()); });
        });
  }

 private:
  // `work` gets the request and the call that it must see answered.
  template <typename Request, typename Work>
  Reactor* Start(std::optional<ops::Rpc> rpc, const Bytes& bytes, Bytes* response,
                 const Work& work) {
    auto* call = new CollectiveCall(rendezvous_, response);
    if (rpc.has_value()) call->CountAs(metrics_, *rpc, bytes.Length());
    Request request;
    if (absl::Status status = rpc::DecodeMessage(bytes, &request); !status.ok()) {
      call->Answer(status, Request());
    } else {
      call->Started(work(request, call));
    }
    return call;
  }

  Rendezvous* const rendezvous_;
  ops::ServerMetrics* const metrics_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCollectiveService(Rendezvous* rendezvous,
                                                     ops::ServerMetrics* metrics) {
  return std::make_unique<CollectiveServiceImpl>(rendezvous, metrics);
}

}  // namespace emberd::server
