#include "server/coordinator/passed_sums.h"

#include <algorithm>

#include "base/float_halves.h"
#include "server/coordinator/request_reader.h"

namespace emberd::server {
namespace {

constexpr int64_t kRowNumberBytes = sizeof(int32_t);

void AppendRows(const RowRuns& rows, int64_t begin, int64_t end, int64_t row_bytes,
                SumPieces* sums) {
  rows.ForRows(begin, end, row_bytes, [&](int64_t, int64_t count, const char* from) {
    const auto bytes = static_cast<size_t>(count * row_bytes);
    sums->pieces.push_back({absl::string_view(from, bytes), rows.owner()});
  });
}

}  // namespace

PassedSums::PassedSums(const KeptBatch& batch, int shard, int stack, bool halves)
    : stack_(stack), width_(batch.model->plan.stacks[stack].embedding_dim), halves_(halves) {
  const preprocess::StackPlan& plan = batch.model->plan.stacks[stack];
  for (const preprocess::FeaturePlan& feature : plan.features) {
    if (!batch.HasRows(feature.feature)) continue;
    if (plan.tables[feature.table_in_stack].embedding_dim != width_) continue;
    int64_t first = 0;
    for (const PlaceRange& range : batch.row_places[feature.feature]) {
      const int64_t rows = range.end - range.begin;
      if (range.shard == shard) ranges_.push_back({feature.feature, first, range.begin, range.end});
      first += rows;
    }
  }
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const auto rows = static_cast<int64_t>(batch.shards[shard].entries[stack]->partition_ends.back());
  int64_t next = 0;
  bool each_once = true;
  for (const Range& range : ranges_) {
    each_once = each_once && range.begin == next;
    next = range.end;
  }
  if (!each_once || next != rows) ranges_.clear();
}

bool PassedSums::MayPass(const GradientInput& input) const {
  if (ranges_.empty()) return false;
  const FeatureGradientView* first = nullptr;
  for (const Range& range : ranges_) {
    const FeatureGradientView& view = input.features[range.feature];
    if (!view.rows.given()) continue;
    if (first == nullptr) first = &view;
    if (!view.of_rows || view.rows.owner() == nullptr || view.dtype != first->dtype ||
        (view.dtype != v1::FLOAT32 && !halves_)) {
      return false;
    }
  }
  return true;
}

std::optional<SumPieces> PassedSums::Pass(const GradientInput& input) const {
  if (!MayPass(input)) return std::nullopt;
  for (const Range& range : ranges_) {
    if (!input.features[range.feature].rows.given()) return std::nullopt;
  }
  SumPieces sums;
  sums.stack = stack_;
  sums.dtype = input.features[ranges_.front().feature].dtype;
  sums.rows = ranges_.back().end;
  sums.width = width_;
  for (const Range& range : ranges_) {
    AppendRows(input.features[range.feature].rows, range.first,
               range.first + range.end - range.begin, width_ * ElementSize(sums.dtype), &sums);
  }
  for (const Range& range : ranges_) PassLowerHalves(input.features[range.feature], range, &sums);
  // With so many lower halves, floats are no more, and need not be joined.
  const auto lower_rows = static_cast<int64_t>(sums.lower_rows.size());
  if (lower_rows * (width_ * kHalfBytes + kRowNumberBytes) >= sums.rows * width_ * kHalfBytes)
    return std::nullopt;
  return sums;
}

void PassedSums::PassLowerHalves(const FeatureGradientView& view, const Range& range,
                                 SumPieces* sums) const {
  const absl::Span<const int32_t> lower = view.lower_rows;
  const int64_t past = range.first + range.end - range.begin;
  const int64_t begin = std::lower_bound(lower.begin(), lower.end(), range.first) - lower.begin();
  const int64_t end = std::lower_bound(lower.begin(), lower.end(), past) - lower.begin();
  for (int64_t i = begin; i < end; ++i) {
    sums->lower_rows.push_back(static_cast<int32_t>(lower[i] - range.first + range.begin));
  }
  const int64_t in_tensor = view.rows.rows() - static_cast<int64_t>(lower.size());
  AppendRows(view.rows, in_tensor + begin, in_tensor + end, width_ * ElementSize(view.dtype), sums);
}

}  // namespace emberd::server
