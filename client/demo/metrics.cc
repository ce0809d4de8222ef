#include "client/demo/metrics.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "client/demo/mlp.h"

namespace emberd::demo {

double Auc(absl::Span<const float> scores, absl::Span<const float> labels) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return scores[a] < scores[b]; });
  double positives = 0, negatives = 0;
  double below = 0;  // pairs (positive, negative) in the right order, ties as one half
  for (size_t i = 0; i < order.size();) {
    double tied_positives = 0, tied_negatives = 0;
    const float score = scores[order[i]];
    for (; i < order.size() && scores[order[i]] == score; ++i) {
      (labels[order[i]] > 0.5f ? tied_positives : tied_negatives) += 1;
    }
    below += tied_positives * (negatives + 0.5 * tied_negatives);
    positives += tied_positives;
    negatives += tied_negatives;
  }
  return positives == 0 || negatives == 0 ? 0.5 : below / (positives * negatives);
}

void RollingMetrics::Add(absl::Span<const float> logits, absl::Span<const float> labels) {
  logits_.insert(logits_.end(), logits.begin(), logits.end());
  labels_.insert(labels_.end(), labels.begin(), labels.end());
  const int64_t excess = std::max<int64_t>(0, size() - window_);
  logits_.erase(logits_.begin(), logits_.begin() + excess);
  labels_.erase(labels_.begin(), labels_.begin() + excess);
}

double RollingMetrics::auc() const {
  return Auc(std::vector<float>(logits_.begin(), logits_.end()),
             std::vector<float>(labels_.begin(), labels_.end()));
}

double RollingMetrics::log_loss() const {
  Vector logits(size());
  std::copy(logits_.begin(), logits_.end(), logits.data());
  return LogLoss(logits, std::vector<float>(labels_.begin(), labels_.end()));
}

}  // namespace emberd::demo
