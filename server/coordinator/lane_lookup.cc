#include "server/coordinator/lane_lookup.h"

#include <utility>
#include <vector>

#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/coordinator/unary_steps.h"
#include "server/ops/metrics.h"
#include "server/ops/rpc_names.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/rpc/spans.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"
#include "server/step/lookup_response.h"

namespace emberd::coordinator {
namespace {

constexpr absl::string_view kLookupMethod = "/emberd.v1.EmbeddingService/Lookup";

// One Lookup that came over a lane.
class LaneLookup {
 public:
  LaneLookup(const CoordinatorResources* resources, const CallEnvironment& environment,
             LaneCall* call)
      : resources_(resources),
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
                         ? resources_->steps->Lookup(request, &context_)
                         : resources_->steps->LookupForReader(request, &context_));
    ops::StageTimer timer(resources_->metrics, ops::Stage::kEncode);
    answer->body = step::EncodeLookupText(output);
    answer->elsewhere = answer->body.size() > kMaxBody;
    // The trainer asks again over gRPC, and so never learns the handle of this batch.
    if (answer->elsewhere && output.batch_handle != 0) {
      resources_->path->Discard(request.model_id(), output.batch_handle);
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

  const CoordinatorResources* const resources_;
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

LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security) {
  return [resources, environment, security](LaneCall* call) -> LaneAnswer {
    if (call->request().method != v1::LOOKUP) return {.status = rpc::UnknownLaneMethod(*call)};
    absl::Status refused = rpc::CheckLaneCall(security, kLookupMethod, *call);
    if (!refused.ok()) return {.status = std::move(refused)};
    return LaneLookup(resources, environment, call).Run();
  };
}

}  // namespace emberd::coordinator
