// How good predictions are.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/types/span.h"

namespace emberd::demo {

// Area under the ROC curve, exact: the probability that a random positive scores above a random
// negative, ties counting half. 0.5 where there are only positives or only negatives. Labels are 0
// or 1; scores are not NaN.
double Auc(absl::Span<const float> scores, absl::Span<const float> labels);

// AUC and log loss over the latest examples. Not thread-safe.
class RollingMetrics {
 public:
  explicit RollingMetrics(int64_t window) : window_(window) {}

  void Add(absl::Span<const float> logits, absl::Span<const float> labels);
  double auc() const;
  double log_loss() const;
  int64_t size() const { return static_cast<int64_t>(logits_.size()); }

 private:
  int64_t window_;
  std::deque<float> logits_, labels_;
};

}  // namespace emberd::demo
