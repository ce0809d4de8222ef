#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/emberctl/explain/batch_file.h"
#include "client/emberctl/explain/explanation.h"
#include "client/emberctl/explain/jax_case.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

using nlohmann::json;

constexpr char kExplainFooter[] = R"(
Example:
  emberctl explain --model model.textproto --batch batch.json --shards 4 --sparsecores 2

BATCH is one of
  a JSON file: {"FEATURE": {"ids": [[1, 2], [], 3], "weights": [[0.5, 1], [], 2]}, ...}, one element
    per sample, a list of ids or a single id; weights may be absent
  a directory of .npy files (little-endian int32, int64 and float32, C order), or single ones:
    FEATURE.ids.npy [samples] or [samples, ids per sample], or FEATURE.values.npy with
    FEATURE.row_splits.npy [samples + 1]; and FEATURE.weights.npy where there are weights

CASE is a recorded case of jax-tpu-embedding's behaviour, of kind preprocess, stacking, hash, keys or
split. What its `expected` holds is printed as JSON, with or without --json. Where that system
aborts, {"error": {"code": ..., "message": ...}} is printed and the exit code is 1. Samples whose
weights sum to zero (their squares, with sqrtn) have NaN or infinite gains there and in the cases;
emberd's servers give them a gain of 0, and so does --zero-gains here.)";

struct ExplainOptions {
  std::string test_case;  // a recorded case; empty: the rest
  bool zero_gains = false;
  std::string model;                 // a ModelConfig
  std::vector<std::string> batches;  // see batch_file.h
  ClusterShape cluster;
};

absl::StatusOr<json> LoadJson(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  try {
    return json::parse(file);
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not JSON: ", error.what()));
  }
}

absl::StatusCode CodeOf(const std::string& name) {
  for (int code = 0; code <= static_cast<int>(absl::StatusCode::kUnauthenticated); ++code) {
    const auto candidate = static_cast<absl::StatusCode>(code);
    if (absl::StatusCodeToString(candidate) == name) return candidate;
  }
  return absl::StatusCode::kUnknown;
}

absl::StatusOr<json> RunCase(const std::string& path, bool zero_gains) {
  ASSIGN_OR_RETURN(const json test_case, LoadJson(path));
  absl::StatusOr<json> result = preprocess::RunJaxCase(test_case, {.divide_by_zero = !zero_gains});
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat(path, ": ", result.status().message()));
  }
  if (!result->contains("fatal")) return result;
  return absl::Status(CodeOf(result->at("code").get<std::string>()),
                      result->at("fatal").get<std::string>());
}

// Runs a recorded case of jax-tpu-embedding's behaviour and prints, as JSON, what its `expected`
// holds. Where that system aborts, {"error": {"code", "message"}} is printed and the error
// returned. `zero_gains`: weights that sum to zero give gains of 0, not NaN or infinity.
absl::Status ExplainCase(Session& session, const std::string& path, bool zero_gains) {
  const absl::StatusOr<json> result = RunCase(path, zero_gains);
  if (result.ok()) {
    session.out << result->dump() << "\n";
    return absl::OkStatus();
  }
  const json error = {{"code", absl::StatusCodeToString(result.status().code())},
                      {"message", std::string(result.status().message())}};
  session.out << json{{"error", error}}.dump() << "\n";
  return result.status();
}

// Cuts the batch into mini-batches as `limits` says, which is `shown`, or the same without its
// limits, and prints it with those of `shown`: a report or, with session.json, everything down to
// the buffers.
absl::Status Explain(Session& session, const BatchFile& file, const v1::ModelConfig& limits,
                     const v1::ModelConfig& shown, const preprocess::Topology& topology) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, preprocess::MakePlan(limits, topology));
  ASSIGN_OR_RETURN(const preprocess::Plan shown_plan, preprocess::MakePlan(shown, topology));
  ASSIGN_OR_RETURN(const auto preprocessor,
                   preprocess::Preprocessor::Create(&limits, &plan, nullptr));
  ASSIGN_OR_RETURN(auto sorted, preprocessor->Sort(file.inputs()));
  absl::StatusOr<uint64_t> cuts = 0;
  if (sorted->needs_minibatches()) cuts = preprocessor->FindCuts(sorted.get());
  if (!cuts.ok()) return cuts.status();
  ASSIGN_OR_RETURN(const auto batch, preprocessor->Finish(std::move(sorted), *cuts));
  const Explanation explanation = {shown, shown_plan, *batch, *cuts,
                                   preprocess::BatchCost(shown_plan, *batch)};
  if (session.json) {
    PrintExplanationJson(explanation, session.out);
  } else {
    PrintReport(explanation, session.out);
  }
  return absl::OkStatus();
}

absl::Status ExplainBatch(Session& session, const ExplainOptions& options) {
  ASSIGN_OR_RETURN(const v1::ModelConfig model, config::LoadModel(options.model));
  ASSIGN_OR_RETURN(const v1::ClusterConfig cluster, ClusterOf(options.cluster));
  const preprocess::Topology topology = {cluster.shards_size(), cluster.sparsecores_per_shard()};
  ASSIGN_OR_RETURN(const BatchFile file, BatchFile::Load(options.batches, model));
  absl::Status status = Explain(session, file, model, model, topology);
  if (!absl::IsResourceExhausted(status)) return status;
  // What is over the limits is best seen in the counts.
  v1::ModelConfig unlimited = model;
  for (v1::TableConfig& table : *unlimited.mutable_tables()) {
    table.set_max_ids_per_partition(0);
    table.set_max_unique_ids_per_partition(0);
  }
  RETURN_IF_ERROR(Explain(session, file, unlimited, model, topology));
  return status;
}

}  // namespace

void AddExplain(CLI::App& app, Session& session, Command& command) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* explain = app.add_subcommand("explain",
                                         "Show how a batch is stacked, placed and cut into "
                                         "mini-batches, and what it costs; --json adds all "
                                         "buffers. Needs no server");
  explain->footer(kExplainFooter);
  CLI::Option_group* subject = explain->add_option_group("subject");
  CLI::Option* test_case = subject->add_option("--case", options->test_case, "CASE file");
  CLI::Option* model =
      subject->add_option("--model", options->model, "ModelConfig as text proto or JSON");
  subject->require_option(1);
  explain->add_flag("--zero-gains", options->zero_gains, "Do not divide by zero in a CASE: gain 0")
      ->needs(test_case);
  CLI::Option* batch =
      explain->add_option("--batch", options->batches, "BATCH; may be given several times")
          ->needs(model);
  model->needs(batch);
  AddClusterShapeOptions(explain, model, &options->cluster);
  explain->callback([options, &session, &command] {
    command = [options, &session] {
      if (!options->model.empty()) return ExplainBatch(session, *options);
      return ExplainCase(session, options->test_case, options->zero_gains);
    };
  });
}

}  // namespace emberd::emberctl
