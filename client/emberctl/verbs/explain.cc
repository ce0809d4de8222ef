#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "client/emberctl/explain/batch_file.h"
#include "client/emberctl/explain/explanation.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

constexpr char kExample[] =
    R"(emberctl explain --model model.textproto --batch batch.json --shards 4 --sparsecores 2

BATCH is one of
  a JSON file: {"FEATURE": {"ids": [[1, 2], [], 3], "weights": [[0.5, 1], [], 2]}, ...}, one element
    per sample, a list of ids or a single id, in lists as output_shape has them; weights may be absent
  a directory of .npy files (little-endian int32, int64 and float32, C order), or single ones:
    FEATURE.ids.npy [samples], [samples, ids per sample] or as output_shape says, or FEATURE.values.npy with
    FEATURE.row_splits.npy [samples + 1]; and FEATURE.weights.npy where there are weights)";

struct ExplainOptions {
  std::string model;                 // a ModelConfig
  std::vector<std::string> batches;  // see batch_file.h
  std::vector<std::string> others;   // the same, one for each other replica
  std::string format;                // "tensorflow", or empty
  ClusterShape cluster;
};

// Cuts the batches, one for each replica, into mini-batches as `limits` says, which is `shown`, or
// the same without its limits, and prints the first with those of `shown`: a report or, with
// session.json, everything down to the buffers; or all of them for TensorFlow.
absl::Status Explain(Session& session, absl::Span<const BatchFile> files, bool tensorflow,
                     const v1::ModelConfig& limits, const v1::ModelConfig& shown,
                     const preprocess::Topology& topology) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, preprocess::MakePlan(limits, topology));
  ASSIGN_OR_RETURN(const preprocess::Plan shown_plan, preprocess::MakePlan(shown, topology));
  ASSIGN_OR_RETURN(const auto preprocessor,
                   preprocess::Preprocessor::Create(&limits, &plan, nullptr));
  std::vector<std::unique_ptr<preprocess::SortedBatch>> sorted(files.size());
  bool cut = false;
  for (size_t r = 0; r < files.size(); ++r) {
    auto one = preprocessor->Sort(files[r].inputs());
    if (!one.ok() && r > 0) return Annotate(one.status(), absl::StrCat("--other ", r));
    ASSIGN_OR_RETURN(sorted[r], std::move(one));
    cut = cut || sorted[r]->needs_minibatches();
  }
  uint64_t cuts = 0;
  for (const auto& one : sorted) {
    if (!cut) break;
    ASSIGN_OR_RETURN(const uint64_t more, preprocessor->FindCuts(one.get()));
    cuts |= more;
  }
  std::vector<std::shared_ptr<const preprocess::PreprocessedBatch>> batches(files.size());
  for (size_t r = 0; r < files.size(); ++r) {
    ASSIGN_OR_RETURN(batches[r], preprocessor->Finish(sorted[r].get(), cuts));
  }
  const Explanation explanation = {shown, shown_plan, *batches[0], cuts,
                                   preprocess::BatchCost(shown_plan, *batches[0])};
  if (tensorflow) {
    PrintTensorFlowJson(plan, batches, session.out);
  } else if (session.json) {
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
  std::vector<BatchFile> files;
  ASSIGN_OR_RETURN(BatchFile first, BatchFile::Load(options.batches, model));
  files.push_back(std::move(first));
  for (const std::string& other : options.others) {
    ASSIGN_OR_RETURN(BatchFile file, BatchFile::Load({other}, model));
    files.push_back(std::move(file));
  }
  const bool tensorflow = !options.format.empty();
  absl::Status status = Explain(session, files, tensorflow, model, model, topology);
  if (!absl::IsResourceExhausted(status) || tensorflow) return status;
  // What is over the limits is best seen in the counts.
  v1::ModelConfig unlimited = model;
  for (v1::TableConfig& table : *unlimited.mutable_tables()) {
    table.set_max_ids_per_partition(0);
    table.set_max_unique_ids_per_partition(0);
  }
  unlimited.mutable_plan()->set_max_ids_per_chip_per_sample(0);
  unlimited.mutable_plan()->set_max_minibatches_per_sparsecore(0);
  RETURN_IF_ERROR(Explain(session, files, tensorflow, unlimited, model, topology));
  return status;
}

}  // namespace

void AddExplain(CLI::App& app, Session& session) {
  auto [explain, options] = AddVerb(
      app, session, "explain",
      "Show how a batch is stacked, placed and cut into mini-batches, and what it costs; --json "
      "adds all buffers. Needs no server",
      kExample, ExplainBatch);
  CLI::Option* model =
      explain->add_option("--model", options->model, "ModelConfig as text proto or JSON");
  model->required();
  explain->add_option("--batch", options->batches, "BATCH; may be given several times")->required();
  explain->add_option(
      "--other", options->others,
      "BATCH of another replica of the step: all are cut alike. May be given several "
      "times");
  explain
      ->add_option("--format", options->format,
                   "tensorflow: of each replica's chip, the CSR-wrapped COO of each stack in "
                   "TensorFlow's layout, as JSON")
      ->check(CLI::IsMember({"tensorflow"}));
  AddClusterShapeOptions(explain, model, &options->cluster);
}

}  // namespace emberd::emberctl
