#include <fstream>
#include <string>

#include <google/protobuf/text_format.h>

#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

struct LimitsOptions {
  std::string model;
  double headroom = 1.2;  // >= 1: suggested limit over observed maximum
  std::string out;        // where to write the model config with the suggested limits; may be empty
  bool apply = false;     // sets the suggested limits
  bool declared = false;  // sets the limits of the model's description
};

// The counts of one coordinator.
absl::StatusOr<v1::GetLimitsResponse> FetchLimits(const Session& session,
                                                  const std::string& address,
                                                  const std::string& model) {
  Session one = session.At(address);
  v1::GetLimitsRequest request;
  request.set_model(model);
  auto response = one.Call<v1::GetLimitsResponse>(request);
  RETURN_IF_ERROR(Annotate(response.status(), address));
  return response;
}

absl::StatusOr<v1::GetLimitsResponse> FetchAllLimits(const Session& session,
                                                     const std::string& model) {
  v1::GetLimitsResponse all;
  for (const std::string& address : session.addresses) {
    ASSIGN_OR_RETURN(v1::GetLimitsResponse one, FetchLimits(session, address, model));
    if (all.stacks_size() == 0) {
      all = std::move(one);
      continue;
    }
    if (one.stacks_size() != all.stacks_size()) {
      return absl::InternalError(absl::StrCat(
          address, ": this coordinator has another plan of the model than the first one"));
    }
    for (int k = 0; k < all.stacks_size(); ++k) {
      MergeSketch(one.stacks(k).ids(), all.mutable_stacks(k)->mutable_ids());
      MergeSketch(one.stacks(k).unique_ids(), all.mutable_stacks(k)->mutable_unique_ids());
    }
  }
  return all;
}

void AddLine(const v1::StackLimits& stack, const char* what, int32_t limit,
             const v1::CountSketch& sketch, double headroom, Table* lines) {
  const int32_t suggested = SuggestedLimit(sketch.max(), headroom);
  lines->push_back({stack.stack(), what, Batches(sketch), Quantile(sketch, 0.5),
                    Quantile(sketch, 0.9), Quantile(sketch, 0.99), sketch.max(), Limit(limit),
                    suggested == 0 ? Cell("-") : suggested});
}

void PrintLimits(const v1::GetLimitsResponse& limits, double headroom, std::ostream& out) {
  Table lines = {
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

absl::Status PrintLimitsJson(const v1::GetLimitsResponse& limits, const LimitsOptions& options,
                             std::ostream& out) {
  Json stacks = Json::array();
  for (const v1::StackLimits& stack : limits.stacks()) {
    stacks.push_back(
        {{"stack", stack.stack()},
         {"ids", CountsJson(stack.max_ids_per_partition(), stack.ids(), options.headroom)},
         {"unique_ids",
          CountsJson(stack.max_unique_ids_per_partition(), stack.unique_ids(), options.headroom)}});
  }
  return PrintJson(Json{{"model", options.model}, {"stacks", std::move(stacks)}}, out);
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

// What a coordinator is to set, and passes on to the others.
v1::SetLimitsRequest LimitsToSet(const v1::GetLimitsResponse& limits,
                                 const LimitsOptions& options) {
  v1::SetLimitsRequest request;
  request.set_model(options.model);
  request.set_declared(options.declared);
  if (options.declared) return request;
  for (const v1::StackLimits& stack : limits.stacks()) {
    if (stack.ids().max() == 0) continue;  // nothing is known of it
    v1::StackLimit* limit = request.add_limits();
    limit->set_stack(stack.stack());
    limit->set_max_ids_per_partition(SuggestedLimit(stack.ids().max(), options.headroom));
    limit->set_max_unique_ids_per_partition(
        SuggestedLimit(stack.unique_ids().max(), options.headroom));
  }
  return request;
}

absl::Status SetLimits(Session& session, const v1::SetLimitsRequest& request) {
  if (!request.declared() && request.limits().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model '", request.model(),
        "' has had no batch since these coordinators started, so no limits are suggested; use it, "
        "and try again"));
  }
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::SetLimitsResponse>(request));
  // The other coordinators look at once.
  RETURN_IF_ERROR(FetchAllLimits(session, request.model()).status());
  if (session.json) return absl::OkStatus();
  session.out << "limits of model '" << request.model() << "' now, per partition:\n";
  Table lines = {{"STACK", "IDS", "UNIQUE IDS"}};
  for (const v1::StackLimit& limit : response.limits()) {
    lines.push_back({limit.stack(), Limit(limit.max_ids_per_partition()),
                     Limit(limit.max_unique_ids_per_partition())});
  }
  PrintColumns(lines, session.out);
  return absl::OkStatus();
}

// Asks every coordinator that the command line names, for each knows its own batches only.
absl::Status Limits(Session& session, const LimitsOptions& options) {
  ASSIGN_OR_RETURN(const v1::DescribeModelResponse model, session.DescribeModel(options.model));
  ASSIGN_OR_RETURN(const v1::GetLimitsResponse limits, FetchAllLimits(session, options.model));
  if (session.json) {
    RETURN_IF_ERROR(PrintLimitsJson(limits, options, session.out));
  } else {
    PrintLimits(limits, options.headroom, session.out);
  }
  if (!options.out.empty()) {
    RETURN_IF_ERROR(WriteConfig(WithSuggestedLimits(model, limits, options.headroom), options.out));
    if (!session.json) session.out << "wrote " << options.out << "\n";
  }
  if (!options.apply && !options.declared) return absl::OkStatus();
  return SetLimits(session, LimitsToSet(limits, options));
}

}  // namespace

void AddLimits(CLI::App& app, Session& session) {
  auto [limits, options] = AddVerb(
      app, session, "limits",
      "Show what batches have needed per partition since the coordinators started, and the limits "
      "that this suggests; every --address is asked",
      "emberctl limits my_model --headroom 1.3 --out tighter.textproto", Limits);
  limits->add_option("MODEL", options->model, "Name of the model")->required();
  limits->add_option("--headroom", options->headroom, "Suggested limit divided by observed maximum")
      ->check(Within(1.0, 1e6))
      ->capture_default_str();
  limits->add_option("--out", options->out,
                     "Write the model config, with the suggested limits, as text proto");
  CLI::Option* apply = limits->add_flag("--apply", options->apply,
                                        "Set the suggested limits now, while the model is trained; "
                                        "its rows and results do not change");
  limits
      ->add_flag("--declared", options->declared,
                 "Set the limits again that the model was declared with")
      ->excludes(apply);
}

}  // namespace emberd::emberctl
