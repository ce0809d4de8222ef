// How good predictions are, and the learning curve as files: CSV for programs, SVG for eyes.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
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

// State of a run after some examples.
struct CurvePoint {
  int64_t examples = 0;
  double seconds = 0;  // of training
  double loss =
      0;  // mean log loss of the latest training examples, each scored before it was learned from
  double auc = 0;  // of the same
  double held_out_auc = 0;
};

// "examples,seconds,loss,auc,held_out_auc", one point a line.
std::string CurveCsv(const std::vector<CurvePoint>& points);
// A self-contained picture: both AUCs over the examples, and best_auc as a line.
std::string CurveSvg(const std::string& title, const std::vector<CurvePoint>& points,
                     double best_auc, const std::string& best_label);

absl::Status WriteFile(const std::string& path, const std::string& content);

}  // namespace emberd::demo
