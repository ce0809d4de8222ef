// Reads the gradients of an update.
#pragma once

#include "absl/status/statusor.h"
#include "base/cpu_pool.h"
#include "base/region_server.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/step/gradients.h"

namespace emberd::step {

// Checks everything that an update may have wrong: names, types, shapes, finite values,
// hyper-parameters, and the step where an optimizer needs it. Errors are INVALID_ARGUMENT and name
// the feature or table, the value and the rule; of several, what stands first in the request.
// Gradients that lie in memory shared with the client (of `regions`) may change after this: the
// shards check the values that are copied to them, and take those that they read in place as they
// are. The result refers to the memory of `request`. `regions` and `cpu` may be null.
absl::StatusOr<GradientInput> ReadGradients(const v1::ApplyGradientsRequest& request,
                                            const KeptBatch& batch,
                                            const RegionServer* regions = nullptr,
                                            CpuPool* cpu = nullptr);

}  // namespace emberd::step
