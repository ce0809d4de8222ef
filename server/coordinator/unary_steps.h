// A step as two calls, Lookup and ApplyGradients, without their transport.
#pragma once

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"
#include "server/step/step.h"

namespace emberd::coordinator {

// Thread-safe. Methods block until the answer is there; `context` carries the caller's deadline and
// cancellation. Errors and their codes: see emberd/v1/embedding_service.proto.
class UnarySteps {
 public:
  // `resources` must outlive it.
  explicit UnarySteps(const CoordinatorResources* resources) : resources_(resources) {}

  // `role`: the caller's. PERMISSION_DENIED for a lookup that would keep a batch of one who may not
  // train.
  absl::StatusOr<step::LookupOutput> Lookup(const v1::LookupRequest& request, v1::Token::Role role,
                                            rpc::CallContext* context);
  absl::StatusOr<v1::ApplyGradientsResponse> ApplyGradients(
      const v1::ApplyGradientsRequest& request, rpc::CallContext* context);
  absl::StatusOr<v1::ReleaseBatchResponse> ReleaseBatch(const v1::ReleaseBatchRequest& request,
                                                        rpc::CallContext* context);

 private:
  const CoordinatorResources* const resources_;
};

}  // namespace emberd::coordinator
