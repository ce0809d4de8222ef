#include "server/coordinator/lane_lookup.h"

#include "base/status.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/coordinator/unary_steps.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/security/callers.h"
#include "server/step/lookup_response.h"
#include "server/step/step.h"

namespace emberd::coordinator {
namespace {

// One Lookup that came over a lane.
class LaneLookup {
 public:
  LaneLookup(const CoordinatorResources* resources, const CallEnvironment& environment,
             LaneCall* call)
      : resources_(resources),
        lane_(call),
        call_(environment, ops::Rpc::kLookup, rpc::DeadlineOf(*call, environment.default_deadline),
              call->request().trace, static_cast<int64_t>(call->request().body.size())) {
    environment.metrics->Add(ops::MetricId::kLaneCalls);
    call->OnCancel([this] { call_.context.Cancel(); });
  }

  LaneAnswer Run() {
    LaneAnswer answer;
    answer.status = LookUp(&answer);
    lane_->OnCancel(nullptr);
    if (answer.status.ok()) call_.timer.AddResponseBytes(static_cast<int64_t>(answer.body.size()));
    call_.End(answer.status);
    return answer;
  }

 private:
  absl::Status LookUp(LaneAnswer* answer) {
    const absl::string_view authorization = lane_->request().authorization;
    RETURN_IF_ERROR(call_.Admit(security::ClientName(authorization, lane_->peer().address)));
    rpc::ArenaMessage<v1::LookupRequest> arena_request;
    v1::LookupRequest& request = *arena_request;
    const absl::string_view body = lane_->request().body;
    if (!request.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
      return absl::InvalidArgumentError("the request is not a valid emberd.v1.LookupRequest");
    }
    ASSIGN_OR_RETURN(
        const step::LookupOutput output,
        resources_->steps->Lookup(request, security::RoleOf(authorization), &call_.context));
    ops::StageTimer timer(resources_->metrics, ops::Stage::kEncode);
    answer->body = step::EncodeLookupText(output);
    answer->elsewhere = answer->body.size() > kMaxBody;
    // The trainer asks again over gRPC, and so never learns the handle of this batch.
    if (answer->elsewhere && output.batch_handle != 0) {
      resources_->path->Discard(request.model_id(), output.batch_handle);
    }
    return absl::OkStatus();
  }

  // What fits in a packet beside the few bytes before it.
  static constexpr size_t kMaxBody = lanes::kMaxPacketBytes - 256;

  const CoordinatorResources* const resources_;
  LaneCall* const lane_;
  UnaryCall call_;
};

}  // namespace

LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security) {
  return rpc::ServeOnLanes(
      v1::LOOKUP, "/emberd.v1.EmbeddingService/Lookup", security,
      [=](LaneCall* call) { return LaneLookup(resources, environment, call).Run(); });
}

}  // namespace emberd::coordinator
