#include "client/emberctl/explain.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "client/emberctl/batch_file.h"
#include "client/emberctl/explanation.h"
#include "config/config.h"
#include "preprocess/jax_case.h"

namespace emberd::emberctl {
namespace {

using nlohmann::json;

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
  const absl::StatusOr<json> test_case = LoadJson(path);
  if (!test_case.ok()) return test_case.status();
  absl::StatusOr<json> result = preprocess::RunJaxCase(*test_case, {.divide_by_zero = !zero_gains});
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat(path, ": ", result.status().message()));
  }
  if (!result->contains("fatal")) return result;
  return absl::Status(CodeOf(result->at("code").get<std::string>()),
                      result->at("fatal").get<std::string>());
}

}  // namespace

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

absl::Status ExplainBatch(Session& session, const ExplainOptions& options) {
  const absl::StatusOr<v1::ModelConfig> model = config::LoadModel(options.model);
  if (!model.ok()) return model.status();
  const absl::StatusOr<v1::ClusterConfig> cluster = ClusterOf(options.cluster);
  if (!cluster.ok()) return cluster.status();
  const preprocess::Topology topology = {cluster->shards_size(), cluster->sparsecores_per_shard()};
  const absl::StatusOr<preprocess::Plan> plan = preprocess::MakePlan(*model, topology);
  if (!plan.ok()) return plan.status();
  const absl::StatusOr<BatchFile> file = BatchFile::Load(options.batches, *model);
  if (!file.ok()) return file.status();
  const auto preprocessor = preprocess::Preprocessor::Create(&*model, &*plan, {});
  if (!preprocessor.ok()) return preprocessor.status();
  auto sorted = (*preprocessor)->Sort(file->inputs());
  if (!sorted.ok()) return sorted.status();
  absl::StatusOr<uint64_t> cuts = 0;
  if ((*sorted)->needs_minibatches()) cuts = (*preprocessor)->FindCuts(sorted->get());
  if (!cuts.ok()) return cuts.status();
  const auto batch = (*preprocessor)->Finish(*std::move(sorted), *cuts);
  if (!batch.ok()) return batch.status();
  const Explanation explanation = {*model, *plan, **batch, *cuts,
                                   preprocess::BatchCost(*plan, **batch)};
  if (session.json) {
    PrintExplanationJson(explanation, session.out);
  } else {
    PrintReport(explanation, session.out);
  }
  return absl::OkStatus();
}

}  // namespace emberd::emberctl
