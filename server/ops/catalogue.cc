#include "server/ops/catalogue.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <google/protobuf/descriptor.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "emberd/internal/v1/shard_service.pb.h"

namespace emberd::ops {
namespace {

// All of them, the control verbs of shards last.
const std::vector<std::string>& RpcNames() {
  static const auto* const kNames = [] {
    auto* names = new std::vector<std::string>{
#define EMBERD_RPC(service, method, ...) #service "Service/" #method,
        EMBERD_PUBLIC_RPCS(EMBERD_RPC) EMBERD_INTERNAL_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
    };
    const google::protobuf::ServiceDescriptor* const shard =
        internal::v1::GatherHeader::descriptor()->file()->FindServiceByName("ShardService");
    for (int i = 0; i < shard->method_count(); ++i) {
      std::string name = "ShardService/" + shard->method(i)->name();
      if (std::count(names->begin(), names->end(), name) == 0) names->push_back(std::move(name));
    }
    names->resize(kRpcCount);
    return names;
  }();
  return *kNames;
}

constexpr std::string_view kStageNames[] = {"decode",  "preprocess",     "gather_wait",
                                            "combine", "encode",         "stage",
                                            "commit",  "wait_for_ranks", "wait_for_update"};
static_assert(std::size(kStageNames) == kStageCount);

constexpr MetricInfo kCatalogue[] = {
#define EMBERD_GROUP(title, about)
#define EMBERD_METRIC(id, type, name, labels, unit, help) \
  {MetricId::id, name, MetricType::k##type, labels, unit, help},
    EMBERD_METRICS(EMBERD_GROUP, EMBERD_METRIC)
#undef EMBERD_METRIC
#undef EMBERD_GROUP
};

}  // namespace

const std::string& RpcName(Rpc rpc) { return RpcNames()[static_cast<size_t>(rpc)]; }

Rpc ShardRpc(std::string_view verb) {
  const std::vector<std::string>& names = RpcNames();
  const auto found = std::find(names.begin(), names.end(), "ShardService/" + std::string(verb));
  return static_cast<Rpc>(found - names.begin());
}

std::string_view StageName(Stage stage) { return kStageNames[static_cast<size_t>(stage)]; }

std::string CodeName(absl::StatusCode code) {
  const std::string name = absl::StatusCodeToString(code);
  return name.empty() ? "UNKNOWN" : name;
}

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
