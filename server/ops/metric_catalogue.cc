#include "server/ops/metric_catalogue.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace emberd::ops {
namespace {

constexpr MetricInfo kCatalogue[] = {
#define EMBERD_GROUP(title, about)
#define EMBERD_METRIC(id, type, name, labels, unit, help) \
  {MetricId::id, name, MetricType::k##type, labels, unit, help},
    EMBERD_METRICS(EMBERD_GROUP, EMBERD_METRIC)
#undef EMBERD_METRIC
#undef EMBERD_GROUP
};

}  // namespace

std::vector<std::string> MetricInfo::LabelNames() const {
  return absl::StrSplit(absl::string_view(labels.data(), labels.size()), ", ", absl::SkipEmpty());
}

absl::Span<const MetricInfo> MetricCatalogue() { return kCatalogue; }

const MetricInfo& Describe(MetricId id) { return kCatalogue[static_cast<size_t>(id)]; }

const std::vector<double>& BucketBounds(const MetricInfo& metric) {
  static const auto* const kSeconds =
      new std::vector<double>{5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05,
                              0.1,  0.25, 0.5,    1,    2.5,  5,      10,   25,   50};
  static const auto* const kCounts = new std::vector<double>{
      1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216};
  static const auto* const kRatios = new std::vector<double>{
      1, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 16, 64, 256, 1024};
  if (metric.unit == "seconds") return *kSeconds;
  return metric.unit == "ratio" ? *kRatios : *kCounts;
}

std::string MetricReference() {
  std::string page =
      "# Metrics of emberd\n\n"
      "Every process with an `http_address` serves them under `/metrics`, as text for Prometheus. "
      "Counters and\nhistograms start at 0 with the process. A histogram `h` has the series "
      "`h_bucket`, "
      "`h_sum` and `h_count`. A series appears\nwhen there is something to count: a method that "
      "was never called has none.\n\n"
      "This page is printed by `emberd metrics`.\n";
#define EMBERD_GROUP(title, about)          \
  absl::StrAppend(                          \
      &page, "\n## ", title, "\n\n", about, \
      "\n\n| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n");
#define EMBERD_METRIC(id, type, name, labels, unit, help)                                       \
  absl::StrAppend(&page, "| `", name, "` | ", absl::AsciiStrToLower(#type), " | ", unit, " | ", \
                  labels, " | ", help, " |\n");
  EMBERD_METRICS(EMBERD_GROUP, EMBERD_METRIC)
#undef EMBERD_METRIC
#undef EMBERD_GROUP
  return page;
}

}  // namespace emberd::ops
