#include <string>
#include <vector>

#include <google/protobuf/text_format.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/tensor_file.h"
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

// The counts of all coordinators together.
absl::StatusOr<v1::GetLimitsResponse> FetchLimits(const Session& session,
                                                  const std::string& model) {
  v1::GetLimitsRequest request;
  request.set_model(model);
  v1::GetLimitsResponse all;
  for (const std::string& address : session.addresses) {
    auto one = session.At(address).Call<v1::GetLimitsResponse>(request);
    RETURN_IF_ERROR(Annotate(one.status(), address));
    if (all.stacks_size() == 0) {
      all = *std::move(one);
      continue;
    }
    if (one->stacks_size() != all.stacks_size()) {
      return absl::InternalError(absl::StrCat(
          address, ": this coordinator has another plan of the model than the first one"));
    }
    for (int k = 0; k < all.stacks_size(); ++k) {
      const v1::StackLimits& from = one->stacks(k);
      v1::StackLimits& to = *all.mutable_stacks(k);
      MergeSketch(from.ids(), to.mutable_ids());
      MergeSketch(from.unique_ids(), to.mutable_unique_ids());
      MergeSketch(from.ids_per_sample(), to.mutable_ids_per_sample());
      MergeSketch(from.minibatches(), to.mutable_minibatches());
    }
  }
  return all;
}

// One of the counts of a stack.
struct Needed {
  const char* name;
  const char* key;
  int32_t limit;
  const v1::CountSketch& sketch;
  int32_t suggested;
};

std::vector<Needed> NeedsOf(const v1::StackLimits& stack, double headroom) {
  const v1::StackLimit suggested = SuggestedLimits(stack, headroom);
  return {
      {"ids per partition", "ids", stack.max_ids_per_partition(), stack.ids(),
       suggested.max_ids_per_partition()},
      {"unique ids per partition", "unique_ids", stack.max_unique_ids_per_partition(),
       stack.unique_ids(), suggested.max_unique_ids_per_partition()},
      {"ids per chip and sample", "ids_per_chip_per_sample", stack.max_ids_per_chip_per_sample(),
       stack.ids_per_sample(), suggested.max_ids_per_chip_per_sample()},
      {"mini-batches", "minibatches", stack.max_minibatches_per_sparsecore(), stack.minibatches(),
       suggested.max_minibatches_per_sparsecore()}};
}

void PrintLimits(const v1::GetLimitsResponse& limits, double headroom, std::ostream& out) {
  Table lines = {{"STACK", "NEED", "BATCHES", "P50", "P90", "P99", "MAX", "LIMIT", "SUGGESTED"}};
  for (const v1::StackLimits& stack : limits.stacks()) {
    for (const Needed& need : NeedsOf(stack, headroom)) {
      lines.push_back({stack.stack(), need.name, Batches(need.sketch), Quantile(need.sketch, 0.5),
                       Quantile(need.sketch, 0.9), Quantile(need.sketch, 0.99), need.sketch.max(),
                       Limit(need.limit), need.suggested == 0 ? Cell("-") : need.suggested});
    }
  }
  PrintColumns(lines, out);
}

absl::Status PrintLimitsJson(const v1::GetLimitsResponse& limits, const LimitsOptions& options,
                             std::ostream& out) {
  Json stacks = Json::array();
  for (const v1::StackLimits& stack : limits.stacks()) {
    Json& one = stacks.emplace_back(Json{{"stack", stack.stack()}});
    for (const Needed& need : NeedsOf(stack, options.headroom)) {
      one[need.key] = {{"limit", need.limit},
                       {"batches", Batches(need.sketch)},
                       {"p50", Quantile(need.sketch, 0.5)},
                       {"p90", Quantile(need.sketch, 0.9)},
                       {"p99", Quantile(need.sketch, 0.99)},
                       {"max", need.sketch.max()},
                       {"suggested", need.suggested}};
    }
  }
  return PrintJson(Json{{"model", options.model}, {"stacks", std::move(stacks)}}, out);
}

absl::Status WriteConfig(const v1::ModelConfig& model, const std::string& path, std::ostream& out) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(model, &text);
  if (path == "/dev/stdout") {  // behind what stands there; it may lead to a file
    out << text;
    return absl::OkStatus();
  }
  PartialFile file(path);  // it may be the description that the model was made of
  RETURN_IF_ERROR(file.Write(text));
  RETURN_IF_ERROR(file.Close());
  return file.Keep();
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
    v1::StackLimit& limit = *request.add_limits();
    limit = SuggestedLimits(stack, options.headroom);
    // A model without a capacity gets none.
    if (stack.max_ids_per_chip_per_sample() == 0) limit.clear_max_ids_per_chip_per_sample();
    if (stack.max_minibatches_per_sparsecore() == 0) limit.clear_max_minibatches_per_sparsecore();
  }
  return request;
}

absl::Status SetLimits(Session& session, const v1::SetLimitsRequest& request,
                       const LimitsOptions& options) {
  if (!request.declared() && request.limits().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model '", request.model(),
        "' has had no batch since these coordinators started, so no limits are suggested; use it, "
        "and try again"));
  }
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::SetLimitsResponse>(request));
  // The other coordinators look at once.
  ASSIGN_OR_RETURN(const v1::GetLimitsResponse now, FetchLimits(session, request.model()));
  if (session.json) return PrintLimitsJson(now, options, session.out);
  session.out << "limits of model '" << request.model() << "' now:\n";
  Table lines = {{"STACK", "IDS/PARTITION", "UNIQUE IDS/PARTITION", "IDS/SAMPLE", "MINI-BATCHES"}};
  for (const v1::StackLimit& limit : response.limits()) {
    lines.push_back({limit.stack(), Limit(limit.max_ids_per_partition()),
                     Limit(limit.max_unique_ids_per_partition()),
                     Limit(limit.max_ids_per_chip_per_sample()),
                     Limit(limit.max_minibatches_per_sparsecore())});
  }
  PrintColumns(lines, session.out);
  return absl::OkStatus();
}

// Asks every coordinator that the command line names, for each knows its own batches only.
absl::Status Limits(Session& session, const LimitsOptions& options) {
  ASSIGN_OR_RETURN(const v1::DescribeModelResponse model, session.DescribeModel(options.model));
  ASSIGN_OR_RETURN(const v1::GetLimitsResponse limits, FetchLimits(session, options.model));
  const bool sets = options.apply || options.declared;
  if (!session.json) PrintLimits(limits, options.headroom, session.out);
  // Else with the limits that are set.
  if (session.json && !sets) RETURN_IF_ERROR(PrintLimitsJson(limits, options, session.out));
  if (!options.out.empty()) {
    RETURN_IF_ERROR(WriteConfig(WithSuggestedLimits(model, limits, options.headroom), options.out,
                                session.out));
    const bool known =
        absl::c_any_of(limits.stacks(), [](const auto& stack) { return stack.ids().max() > 0; });
    const char* const note = known ? "" : ", with the limits that it has: no batch suggests others";
    if (!session.json) session.out << "wrote " << options.out << note << "\n";
  }
  return sets ? SetLimits(session, LimitsToSet(limits, options), options) : absl::OkStatus();
}

}  // namespace

void AddLimits(CLI::App& app, Session& session) {
  auto [limits, options] =
      AddVerb(app, session, "limits",
              "Show what batches have needed since the coordinators started, and the limits "
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
