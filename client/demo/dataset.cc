#include "client/demo/dataset.h"

namespace emberd::demo {

absl::Span<const int32_t> FeatureColumn::IdsOf(int64_t sample) const {
  if (row_splits.empty()) return absl::MakeConstSpan(ids).subspan(sample, 1);
  return absl::MakeConstSpan(ids).subspan(row_splits[sample],
                                          row_splits[sample + 1] - row_splits[sample]);
}

void Batch::Clear(const DatasetInfo& info) {
  size = 0;
  labels.clear();
  numeric.clear();
  true_probability.clear();
  features.resize(info.features.size());
  for (FeatureColumn& feature : features) {
    feature.ids.clear();
    feature.row_splits.clear();
  }
}

}  // namespace emberd::demo
