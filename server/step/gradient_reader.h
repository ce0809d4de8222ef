// Reads the gradients of an update as they come, part by part.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/cpu_pool.h"
#include "base/region_server.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/step/gradients.h"

namespace emberd::step {

// Checks everything that an update may have wrong: names, types, shapes, finite values,
// hyper-parameters, and the step where an optimizer needs it. Errors are INVALID_ARGUMENT and name
// the feature or table, the value and the rule. Gradients that lie in memory shared with the client
// (of `regions`) may change after this: the shards check the values that are copied to them, and
// take those that they read in place as they are.
//
// Not thread-safe.
class GradientReader {
 public:
  // `regions` and `cpu` may be null, and must outlive the reader otherwise.
  explicit GradientReader(std::shared_ptr<const KeptBatch> batch,
                          const RegionServer* regions = nullptr, CpuPool* cpu = nullptr);

  // The next part of the request, whose gradients are checked now; it must outlive what Finish
  // returns. Its hyper-parameters are added to those of the parts before; step and seed are the
  // first part's.
  void Add(const v1::ApplyGradientsRequest& part);
  // Whether nothing was wrong so far.
  bool ok() const { return status_.ok(); }
  // With the gradients that have come.
  const GradientInput& input() const { return input_; }

  // After the last part; the error is of what stands first in the request. Once.
  absl::StatusOr<GradientInput> Finish();

 private:
  absl::Status ReadFeatures(const v1::ApplyGradientsRequest& part, std::vector<int>* features);
  absl::Status CheckValues(absl::Span<const int> features);

  const std::shared_ptr<const KeptBatch> batch_;
  const RegionServer* const regions_;
  CpuPool* const cpu_;
  GradientInput input_;
  absl::Status status_;
  bool begun_ = false;
  int count_ = 0;                   // gradients so far
  v1::ApplyGradientsRequest rest_;  // what is not gradients
};

}  // namespace emberd::step
