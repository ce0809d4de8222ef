#include "server/group/collective_rpc.h"

#include <optional>
#include <utility>

#include <grpcpp/client_context.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/collective_service.grpc.pb.h"
#include "server/rpc/call_context.h"
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

std::vector<RankProgress> RanksOf(const pb::AdvanceRequest& request) {
  std::vector<RankProgress> ranks;
  for (const pb::RankProgress& from : request.ranks()) {
    ranks.push_back({from.rank(), from.next_step(), from.finished()});
  }
  return ranks;
}

GroupId IdOf(const pb::GroupName& name) { return {name.model_id(), name.group()}; }

// One call, which may wait for others. Deletes itself when it is over.
class CollectiveCall final : public grpc::ServerUnaryReactor {
 public:
  explicit CollectiveCall(grpc::ByteBuffer* response) : response_(response) {}

  void CountAs(ops::ServerMetrics* metrics, ops::Rpc rpc, size_t request_bytes) {
    timer_.emplace(metrics, rpc, static_cast<int64_t>(request_bytes));
  }
  // What to do when the caller goes away. Set before the handler returns, since gRPC tells of that
  // only afterwards.
  void OnCallerGone(Collective::Withdraw withdraw) { withdraw_ = std::move(withdraw); }

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
    if (withdraw_) withdraw_(absl::CancelledError("the caller went away"));
  }
  void OnDone() override { delete this; }

  grpc::ByteBuffer* const response_;
  std::optional<ops::RpcTimer> timer_;
  Collective::Withdraw withdraw_;
};

class CollectiveServiceImpl final : public ServiceBase {
 public:
  CollectiveServiceImpl(Collective* collective, ops::ServerMetrics* metrics,
                        const rpc::ShardPlaceCheck* place)
      : collective_(collective), metrics_(metrics), place_(place) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* Join(Context* context, const Bytes* bytes, Bytes* response) override {
    return Start<pb::JoinRequest>(
        *context, ops::Rpc::kCollectiveJoin, *bytes, response,
        [this](const pb::JoinRequest& request, CollectiveCall* call) {
          return collective_->Join(
              IdOf(request.name()), {request.rank(), request.options(), request.coordinator()},
              /*context=*/nullptr, [call](const absl::StatusOr<Membership>& membership) {
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

  Reactor* AllGather(Context* context, const Bytes* bytes, Bytes* response) override {
    return Start<pb::AllGatherRequest>(
        *context, ops::Rpc::kCollectiveAllGather, *bytes, response,
        [this](pb::AllGatherRequest& request, CollectiveCall* call) {
          return collective_->AllGather(
              IdOf(request.name()),
              {request.generation(),
               request.rank(),
               {request.instance_key(), request.group_key()},
               std::move(*request.mutable_value())},
              /*context=*/nullptr, [call](const absl::StatusOr<Gathered>& gathered) {
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

  Reactor* Advance(Context* context, const Bytes* bytes, Bytes* response) override {
    return Start<pb::AdvanceRequest>(
        *context, ops::Rpc::kCollectiveAdvance, *bytes, response,
        [this](const pb::AdvanceRequest& request, CollectiveCall* call) {
          return collective_->Advance(IdOf(request.name()),
                                      {request.generation(), request.rank(), request.next_step(),
                                       request.wait_for(), RanksOf(request)},
                                      /*context=*/nullptr, [call](const absl::Status& status) {
                                        call->Answer(status, pb::AdvanceResponse());
                                      });
        });
  }

  Reactor* Leave(Context* context, const Bytes* bytes, Bytes* response) override {
    return Start<pb::LeaveRequest>(
        *context, ops::Rpc::kCollectiveLeave, *bytes, response,
        [this](const pb::LeaveRequest& request, CollectiveCall* call) {
          return collective_->Leave(
              IdOf(request.name()),
              {request.generation(), request.rank(), request.reason(), request.finished()},
              /*context=*/nullptr,
              [call](const absl::Status& status) { call->Answer(status, pb::LeaveResponse()); });
        });
  }

  // Not counted: it takes as long as its generation lives.
  Reactor* Watch(Context* context, const Bytes* bytes, Bytes* response) override {
    return Start<pb::WatchRequest>(
        *context, std::nullopt, *bytes, response,
        [this](const pb::WatchRequest& request, CollectiveCall* call) {
          return collective_->Watch(
              IdOf(request.name()), request.generation(), request.rank(),
              [call](const absl::Status& status) { call->Answer(status, pb::WatchResponse()); });
        });
  }

 private:
  // `work` gets the request and the call that it must see answered.
  template <typename Request, typename Work>
  Reactor* Start(const Context& context, std::optional<ops::Rpc> rpc, const Bytes& bytes,
                 Bytes* response, const Work& work) {
    auto* call = new CollectiveCall(response);
    if (rpc.has_value()) call->CountAs(metrics_, *rpc, bytes.Length());
    Request request;
    absl::Status status = place_ == nullptr ? absl::OkStatus() : place_->Check(context);
    if (status.ok()) status = rpc::DecodeMessage(bytes, &request);
    if (!status.ok()) {
      call->Answer(status, Request());
    } else {
      call->OnCallerGone(work(request, call));
    }
    return call;
  }

  Collective* const collective_;
  ops::ServerMetrics* const metrics_;
  const rpc::ShardPlaceCheck* const place_;
};

// What the calls of a RemoteCollective have in common. Lives until gRPC is done with it.
template <typename Request, typename Response>
struct RemoteCall {
  void Withdraw(const absl::Status& why) {
    {
      absl::MutexLock lock(&mutex);
      withdrawn = why;
    }
    context.TryCancel();
  }
  // Why the call failed: as its caller said, or else as gRPC says.
  absl::Status End(const grpc::Status& status, const std::string& host) {
    absl::Status result = rpc::FromGrpcStatus(status);
    if (result.ok()) return result;
    absl::MutexLock lock(&mutex);
    if (!withdrawn.ok()) return withdrawn;
    return absl::StartsWith(result.message(), "group ") ? result : Annotate(result, host);
  }

  grpc::ClientContext context;
  Request request;
  Response response;
  absl::Mutex mutex;
  absl::Status withdrawn ABSL_GUARDED_BY(mutex);
};

class RemoteCollective final : public Collective {
 public:
  RemoteCollective(const std::shared_ptr<grpc::Channel>& channel, std::string host)
      : host_(std::move(host)), stub_(Service::NewStub(channel)) {}

  Withdraw Join(const GroupId& id, JoinCall call, const rpc::CallContext* context,
                JoinDone done) override {
    pb::JoinRequest request;
    request.set_rank(call.rank);
    *request.mutable_options() = std::move(call.options);
    request.set_coordinator(std::move(call.coordinator));
    const auto result = [](const pb::JoinResponse& response) {
      return Membership{response.generation(),
                        {response.coordinators().begin(), response.coordinators().end()}};
    };
    return Start<pb::JoinResponse>(&Async::Join, id, std::move(request), context, std::move(done),
                                   result);
  }

  Withdraw AllGather(const GroupId& id, ExchangeCall call, const rpc::CallContext* context,
                     GatherDone done) override {
    pb::AllGatherRequest request;
    request.set_generation(call.generation);
    request.set_rank(call.rank);
    request.set_group_key(call.key.group_key);
    request.set_instance_key(call.key.instance_key);
    request.set_value(std::move(call.value));
    const auto result = [](const pb::AllGatherResponse& response) {
      return Gathered{{response.values().begin(), response.values().end()},
                      {response.arrival_us().begin(), response.arrival_us().end()}};
    };
    return Start<pb::AllGatherResponse>(&Async::AllGather, id, std::move(request), context,
                                        std::move(done), result);
  }

  Withdraw Advance(const GroupId& id, const AdvanceCall& call, const rpc::CallContext* context,
                   StatusDone done) override {
    pb::AdvanceRequest request;
    request.set_generation(call.generation);
    request.set_rank(call.rank);
    request.set_next_step(call.next_step);
    request.set_wait_for(call.wait_for);
    for (const RankProgress& from : call.ranks) {
      pb::RankProgress* to = request.add_ranks();
      to->set_rank(from.rank);
      to->set_next_step(from.next_step);
      to->set_finished(from.finished);
    }
    return Start<pb::AdvanceResponse>(&Async::Advance, id, std::move(request), context,
                                      std::move(done),
                                      [](const auto&) { return absl::OkStatus(); });
  }

  Withdraw Leave(const GroupId& id, const LeaveCall& call, const rpc::CallContext* context,
                 StatusDone done) override {
    pb::LeaveRequest request;
    request.set_generation(call.generation);
    request.set_rank(call.rank);
    request.set_reason(call.reason);
    request.set_finished(call.finished);
    return Start<pb::LeaveResponse>(&Async::Leave, id, std::move(request), context, std::move(done),
                                    [](const auto&) { return absl::OkStatus(); });
  }

  Withdraw Watch(const GroupId& id, uint64_t generation, int rank, StatusDone done) override {
    pb::WatchRequest request;
    request.set_generation(generation);
    request.set_rank(rank);
    return Start<pb::WatchResponse>(
        &Async::Watch, id, std::move(request), /*context=*/nullptr, std::move(done),
        [](const auto&) { return absl::InternalError("the watch ended without a reason"); });
  }

 private:
  using Async = Service::StubInterface::async_interface;
  template <typename Request, typename Response>
  using Method = void (Async::*)(grpc::ClientContext*, const Request*, Response*,
                                 std::function<void(grpc::Status)>);

  // `done` gets result(response), or an error.
  template <typename Response, typename Request, typename Done, typename Result>
  Withdraw Start(Method<Request, Response> method, const GroupId& id, Request request,
                 const rpc::CallContext* context, Done done, Result result) {
    auto call = std::make_shared<RemoteCall<Request, Response>>();
    call->request = std::move(request);
    call->request.mutable_name()->set_model_id(id.model_id);
    call->request.mutable_name()->set_group(id.group);
    if (context != nullptr) {
      call->context.set_deadline(ToSystemTime(context->deadline()));
      rpc::SendTrace(context->trace(), &call->context);
    }
    (stub_->async()->*method)(
        &call->context, &call->request, &call->response,
        [call, host = host_, done = std::move(done), result](const grpc::Status& status) {
          const absl::Status end = call->End(status, host);
          if (end.ok()) {
            done(result(call->response));
          } else {
            done(end);
          }
        });
    return [call](const absl::Status& why) { call->Withdraw(why); };
  }

  const std::string host_;
  const std::unique_ptr<Service::Stub> stub_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCollectiveService(Collective* collective,
                                                     ops::ServerMetrics* metrics,
                                                     const rpc::ShardPlaceCheck* place) {
  return std::make_unique<CollectiveServiceImpl>(collective, metrics, place);
}

std::unique_ptr<Collective> MakeRemoteCollective(const std::shared_ptr<grpc::Channel>& channel,
                                                 std::string host) {
  return std::make_unique<RemoteCollective>(channel, std::move(host));
}

}  // namespace emberd::server
