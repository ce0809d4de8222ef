#include "server/group/collective_rpc.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <grpcpp/client_context.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/internal/v1/collective_service.grpc.pb.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire.h"

namespace emberd::group {
namespace {

namespace pb = internal::v1;

// Every method takes and gives bytes, so that what is no message gets a clear status (gRPC's own
// decoding would say UNIMPLEMENTED).
using Service = pb::CollectiveService;
using ServiceBase = Service::WithRawCallbackMethod_Join<Service::WithRawCallbackMethod_AllGather<
    Service::WithRawCallbackMethod_Advance<Service::WithRawCallbackMethod_Leave<
        Service::WithRawCallbackMethod_Watch<Service::Service>>>>>;

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

  // `response`: for a status that is OK.
  void Answer(absl::Status status, const google::protobuf::Message& response) {
    if (status.ok()) {
      auto encoded = rpc::EncodeMessage(response);
      status = encoded.status();
      if (status.ok()) *response_ = *std::move(encoded);
    }
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

#define EMBERD_VERB(name, rpc)                                                            \
  Reactor* name(Context* context, const Bytes* bytes, Bytes* response) override {         \
    return Start<pb::name##Response>(&Collective::name, rpc, *context, *bytes, response); \
  }
  EMBERD_VERB(Join, ops::Rpc::kCollectiveJoin)
  EMBERD_VERB(AllGather, ops::Rpc::kCollectiveAllGather)
  EMBERD_VERB(Advance, ops::Rpc::kCollectiveAdvance)
  EMBERD_VERB(Leave, ops::Rpc::kCollectiveLeave)
  EMBERD_VERB(Watch, std::nullopt)  // not counted: it takes as long as its generation lives
#undef EMBERD_VERB

 private:
  template <typename Response, typename Request, typename Result>
  Reactor* Start(Collective::Method<Request, Result> method, std::optional<ops::Rpc> rpc,
                 const Context& context, const Bytes& bytes, Bytes* response) {
    auto* call = new CollectiveCall(response);
    if (rpc.has_value()) call->CountAs(metrics_, *rpc, bytes.Length());
    Request request;
    absl::Status status = place_ == nullptr ? absl::OkStatus() : place_->Check(context);
    if (status.ok()) status = rpc::DecodeMessage(bytes, &request);
    if (!status.ok()) {
      call->Answer(status, Response());
      return call;
    }
    call->OnCallerGone((collective_->*method)(
        std::move(request), /*context=*/nullptr, [call](const Result& result) {
          if constexpr (std::is_same_v<Result, absl::Status>) {
            call->Answer(result, Response());
          } else {
            call->Answer(result.status(), result.ok() ? *result : Response());
          }
        }));
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
    std::shared_ptr<grpc::ClientContext> cancelled;
    {
      absl::MutexLock lock(&mutex);
      withdrawn = why;
      cancelled = context;
    }
    if (cancelled != nullptr) cancelled->TryCancel();
  }
  // Why the call failed: as its caller said, or else as gRPC says. The channel is given back.
  absl::Status End(const grpc::Status& status, const std::string& host) {
    absl::Status result = rpc::FromGrpcStatus(status);
    absl::MutexLock lock(&mutex);
    context = nullptr;
    if (result.ok()) return result;
    if (!withdrawn.ok()) return withdrawn;
    return absl::StartsWith(result.message(), "group ") ? result : Annotate(result, host);
  }

  Request request;
  Response response;
  absl::Mutex mutex;
  std::shared_ptr<grpc::ClientContext> context ABSL_GUARDED_BY(mutex) =
      std::make_shared<grpc::ClientContext>();
  absl::Status withdrawn ABSL_GUARDED_BY(mutex);
};

class RemoteCollective final : public Collective {
 public:
  RemoteCollective(const std::shared_ptr<grpc::Channel>& channel, std::string host)
      : host_(std::move(host)), stub_(Service::NewStub(channel)) {}
  // Ends all calls. Until then they hold the channel. If the last to hold it were one of gRPC's
  // threads for callbacks, that thread would wait for its own end, and crash.
  ~RemoteCollective() override {
    absl::flat_hash_map<int64_t, Withdraw> calls;
    {
      absl::MutexLock lock(&mutex_);
      calls = calls_;
    }
    for (const auto& [number, withdraw] : calls) {
      withdraw(absl::CancelledError("the process that called is about to end"));
    }
    absl::MutexLock lock(&mutex_);
    const auto all_over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return calls_.empty(); };
    mutex_.Await(absl::Condition(&all_over));
  }

#define EMBERD_VERB(name, done_type)                                                        \
  Withdraw name(pb::name##Request request, const rpc::CallContext* context, done_type done) \
      override {                                                                            \
    return Start(&Async::name, std::move(request), context, std::move(done));               \
  }
  EMBERD_VERB(Join, JoinDone)
  EMBERD_VERB(AllGather, GatherDone)
  EMBERD_VERB(Advance, StatusDone)
  EMBERD_VERB(Leave, StatusDone)
#undef EMBERD_VERB
  Withdraw Watch(pb::WatchRequest request, const rpc::CallContext* context,
                 StatusDone done) override {
    return Start(
        &Async::Watch, std::move(request), context,
        StatusDone([done = std::move(done)](const absl::Status& status) {
          done(status.ok() ? absl::InternalError("the watch ended without a reason") : status);
        }));
  }

 private:
  using Async = Service::StubInterface::async_interface;
  template <typename Request, typename Response>
  using Method = void (Async::*)(grpc::ClientContext*, const Request*, Response*,
                                 std::function<void(grpc::Status)>);

  template <typename Request, typename Response, typename Result>
  Withdraw Start(Method<Request, Response> method, Request request, const rpc::CallContext* context,
                 std::function<void(Result)> done) {
    auto call = std::make_shared<RemoteCall<Request, Response>>();
    call->request = std::move(request);
    const Withdraw withdraw = [call](const absl::Status& why) { call->Withdraw(why); };
    std::shared_ptr<grpc::ClientContext> mine;
    {
      absl::MutexLock lock(&call->mutex);
      mine = call->context;
    }
    if (context != nullptr) {
      mine->set_deadline(ToSystemTime(context->deadline()));
      rpc::SendTrace(context->trace(), mine.get());
    }
    int64_t number = 0;
    {
      absl::MutexLock lock(&mutex_);
      number = ++started_;
      calls_[number] = withdraw;
    }
    (stub_->async()->*method)(
        mine.get(), &call->request, &call->response,
        [this, call, number, done = std::move(done)](const grpc::Status& status) {
          const absl::Status end = call->End(status, host_);
          Forget(number);  // from here on, `this` may be gone
          if constexpr (!std::is_same_v<Result, absl::Status>) {
            if (end.ok()) return done(std::move(call->response));
          }
          done(end);
        });
    return withdraw;
  }
  void Forget(int64_t number) {
    absl::MutexLock lock(&mutex_);
    calls_.erase(number);
  }

  const std::string host_;
  const std::unique_ptr<Service::Stub> stub_;
  absl::Mutex mutex_;
  int64_t started_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<int64_t, Withdraw> calls_ ABSL_GUARDED_BY(mutex_);  // that are not over
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

}  // namespace emberd::group
