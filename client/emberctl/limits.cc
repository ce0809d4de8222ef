#include "client/emberctl/limits.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include <google/protobuf/text_format.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "client/emberctl/commands.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_output.h"

namespace emberd::emberctl {
namespace {

using Lines = std::vector<std::vector<std::string>>;

// The counts of one coordinator.
absl::StatusOr<v1::GetLimitsResponse> FetchLimits(const Session& session,
                                                  const std::string& address,
                                                  const std::string& model) {
  Session one = session.At(address);
  v1::GetLimitsRequest request;
  request.set_model(model);
  v1::GetLimitsResponse response;
  absl::Status status = one.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.admin->GetLimits(context, request, &response);
  });
  if (!status.ok())
    return absl::Status(status.code(), absl::StrCat(address, ": ", status.message()));
  return response;
}

absl::StatusOr<v1::GetLimitsResponse> FetchAllLimits(const Session& session,
                                                     const std::string& model) {
  v1::GetLimitsResponse all;
  for (const std::string& address : session.addresses) {
    absl::StatusOr<v1::GetLimitsResponse> one = FetchLimits(session, address, model);
    if (!one.ok()) return one.status();
    if (all.stacks_size() == 0) {
      all = *std::move(one);
      continue;
    }
    if (one->stacks_size() != all.stacks_size()) {
      return absl::InternalError(absl::StrCat(address, ": it has another plan of the model"));
    }
    for (int k = 0; k < all.stacks_size(); ++k) {
      MergeSketch(one->stacks(k).ids(), all.mutable_stacks(k)->mutable_ids());
      MergeSketch(one->stacks(k).unique_ids(), all.mutable_stacks(k)->mutable_unique_ids());
    }
  }
  return all;
}

int64_t Batches(const v1::CountSketch& sketch) {
  int64_t batches = 0;
  for (const v1::CountSketch::Bucket& bucket : sketch.buckets()) batches += bucket.count();
  return batches;
}

void AddLine(const v1::StackLimits& stack, const char* what, int32_t limit,
             const v1::CountSketch& sketch, double headroom, Lines* lines) {
  const int32_t suggested = SuggestedLimit(sketch.max(), headroom);
  lines->push_back({stack.stack(), what, absl::StrCat(Batches(sketch)),
                    absl::StrCat(Quantile(sketch, 0.5)), absl::StrCat(Quantile(sketch, 0.9)),
                    absl::StrCat(Quantile(sketch, 0.99)), absl::StrCat(sketch.max()), Limit(limit),
                    suggested == 0 ? "-" : absl::StrCat(suggested)});
}

void PrintLimits(const v1::GetLimitsResponse& limits, double headroom, std::ostream& out) {
  Lines lines = {
      {"STACK", "PER PARTITION", "BATCHES", "P50", "P90", "P99", "MAX", "LIMIT", "SUGGESTED"}};
  for (const v1::StackLimits& stack : limits.stacks()) {
    AddLine(stack, "ids", stack.max_ids_per_partition(), stack.ids(), headroom, &lines);
    AddLine(stack, "unique ids", stack.max_unique_ids_per_partition(), stack.unique_ids(), headroom,
            &lines);
  }
  PrintColumns(lines, out);
}

Json CountsJson(int32_t limit, const v1::CountSketch& sketch, double headroom) {
  return {{"limit", limit},
          {"batches", Batches(sketch)},
          {"p50", Quantile(sketch, 0.5)},
          {"p90", Quantile(sketch, 0.9)},
          {"p99", Quantile(sketch, 0.99)},
          {"max", sketch.max()},
          {"suggested", SuggestedLimit(sketch.max(), headroom)}};
}

void PrintLimitsJson(const v1::GetLimitsResponse& limits, const LimitsOptions& options,
                     std::ostream& out) {
  Json stacks = Json::array();
  for (const v1::StackLimits& stack : limits.stacks()) {
    stacks.push_back(
        {{"stack", stack.stack()},
         {"ids", CountsJson(stack.max_ids_per_partition(), stack.ids(), options.headroom)},
         {"unique_ids",
          CountsJson(stack.max_unique_ids_per_partition(), stack.unique_ids(), options.headroom)}});
  }
  out << Json{{"model", options.model}, {"stacks", std::move(stacks)}}.dump(1) << "\n";
}

absl::Status WriteConfig(const v1::ModelConfig& model, const std::string& path) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(model, &text);
  std::ofstream file(path);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be written"));
}

}  // namespace

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

absl::Status Limits(Session& session, const LimitsOptions& options) {
  const absl::StatusOr<v1::DescribeModelResponse> model = FetchModel(session, options.model);
  if (!model.ok()) return model.status();
  const absl::StatusOr<v1::GetLimitsResponse> limits = FetchAllLimits(session, options.model);
  if (!limits.ok()) return limits.status();
  if (session.json) {
    PrintLimitsJson(*limits, options, session.out);
  } else {
    PrintLimits(*limits, options.headroom, session.out);
  }
  if (options.out.empty()) return absl::OkStatus();
  absl::Status written =
      WriteConfig(WithSuggestedLimits(*model, *limits, options.headroom), options.out);
  if (written.ok() && !session.json) session.out << "wrote " << options.out << "\n";
  return written;
}

}  // namespace emberd::emberctl
