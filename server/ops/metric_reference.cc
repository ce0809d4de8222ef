#include "server/ops/metric_reference.h"

#include <cstddef>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/ops/metric_catalogue.h"

namespace emberd::ops {
namespace {

// The metrics from `first` to the next group.
struct Group {
  MetricId first;
  std::string_view title;
  std::string_view about;
};

constexpr Group kGroups[] = {
    {MetricId::kRpcs, "Requests",
     "On every process, of the services that it serves. `method` is `Service/Method`, `code` the "
     "name of a gRPC status code. The stages are a coordinator's: of a lookup `decode`, "
     "`preprocess`, `gather_wait`, `combine`, `encode`; of an update `decode`, `encode`, `stage`, "
     "`commit`; of a training stream also `wait_for_ranks` and `wait_for_update`."},
    {MetricId::kInFlightRequests, "What a server holds, against its budgets",
     "`server` is `coordinator-I` or `shard-I`. Coordinators hold no tables: theirs is what the "
     "models that they know take on all shards, without a budget."},
    {MetricId::kBatchMinibatches, "Batches",
     "Of the lookups of one coordinator. Beyond 256 pairs, model and stack are `other`."},
    {MetricId::kGroupSteps, "Training groups",
     "Of the ranks that one coordinator serves. Beyond 64 pairs, model and group are `other`; so "
     "is a rank from 64 on."},
    {MetricId::kRowsGathered, "Shards",
     "Beyond 256 pairs, model and stack are `other`; tables beyond 256 are not shown."},
    {MetricId::kShardReachable, "Calls to shards", "As a coordinator sees them."},
    {MetricId::kBuildInfo, "Processes", "Under the names that other exporters use too."},
};

std::string Text(std::string_view text) { return std::string(text); }

std::string_view TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

const Group* GroupThatBegins(MetricId id) {
  for (const Group& group : kGroups) {
    if (group.first == id) return &group;
  }
  return nullptr;
}

}  // namespace

std::string MetricReference() {
  std::string page =
      "# Metrics of emberd\n\n"
      "Every process with an `http_address` serves them under `/metrics`, as text for Prometheus. "
      "Counters and\nhistograms begin with the process. A histogram `h` has the series `h_bucket`, "
      "`h_sum` and `h_count`. A series appears\nwhen there is something to count: a method that "
      "was never called has none.\n\n"
      "This page is printed by `emberd metrics`.\n";
  for (const MetricInfo& metric : MetricCatalogue()) {
    if (const Group* group = GroupThatBegins(metric.id); group != nullptr) {
      absl::StrAppend(&page, "\n## ", Text(group->title), "\n\n", Text(group->about), "\n\n",
                      "| metric | type | unit | labels | meaning |\n",
                      "| --- | --- | --- | --- | --- |\n");
    }
    absl::StrAppend(&page, "| `", Text(metric.name), "` | ", Text(TypeName(metric.type)), " | ",
                    Text(metric.unit), " | ", absl::StrJoin(metric.LabelNames(), ", "), " | ",
                    Text(metric.help), " |\n");
  }
  return page;
}

}  // namespace emberd::ops
