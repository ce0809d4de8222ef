#include "client/emberctl/suggested_limits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace emberd::emberctl {

int64_t Batches(const v1::CountSketch& sketch) {
  int64_t batches = 0;
  for (const v1::CountSketch::Bucket& bucket : sketch.buckets()) batches += bucket.count();
  return batches;
}

void MergeSketch(const v1::CountSketch& more, v1::CountSketch* sketch) {
  std::map<int64_t, int64_t> counts;
  for (const v1::CountSketch& part : {more, *sketch}) {
    for (const v1::CountSketch::Bucket& bucket : part.buckets()) {
      counts[bucket.upper()] += bucket.count();
    }
  }
  sketch->clear_buckets();
  for (const auto& [upper, count] : counts) {
    v1::CountSketch::Bucket* bucket = sketch->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
  sketch->set_max(std::max(sketch->max(), more.max()));
}

int64_t Quantile(const v1::CountSketch& sketch, double fraction) {
  const double wanted = fraction * static_cast<double>(Batches(sketch));
  int64_t seen = 0;
  for (const v1::CountSketch::Bucket& bucket : sketch.buckets()) {
    seen += bucket.count();
    if (static_cast<double>(seen) >= wanted) return std::min(bucket.upper(), sketch.max());
  }
  return sketch.max();
}

int32_t SuggestedLimit(int64_t max, double headroom) {
  constexpr double kLargest = std::numeric_limits<int32_t>::max() / 8 * 8;
  // 80 * 1.1 is a little more than 88 in binary, and 88 is meant.
  const double wanted = static_cast<double>(max) * headroom * (1 - 1e-12);
  const double limit = std::ceil(wanted / 8) * 8;
  return static_cast<int32_t>(std::min(limit, kLargest));
}

v1::ModelConfig WithSuggestedLimits(const v1::DescribeModelResponse& model,
                                    const v1::GetLimitsResponse& limits, double headroom) {
  absl::flat_hash_map<std::string, const v1::StackLimits*> limits_of;  // by table
  for (const v1::StackPlan& stack : model.plan().stacks()) {
    for (const v1::StackLimits& found : limits.stacks()) {
      if (found.stack() != stack.name() || found.ids().max() == 0) continue;
      for (const v1::TablePlan& table : stack.tables()) limits_of[table.name()] = &found;
    }
  }
  v1::ModelConfig config = model.config();
  for (v1::TableConfig& table : *config.mutable_tables()) {
    const auto found = limits_of.find(table.name());
    if (found == limits_of.end()) continue;
    table.set_max_ids_per_partition(SuggestedLimit(found->second->ids().max(), headroom));
    table.set_max_unique_ids_per_partition(
        SuggestedLimit(found->second->unique_ids().max(), headroom));
  }
  return config;
}

}  // namespace emberd::emberctl
