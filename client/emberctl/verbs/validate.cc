#include <algorithm>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"
#include "preprocess/batch/csr.h"

namespace emberd::emberctl {
namespace {

struct ValidateOptions {
  std::string path;
  std::string kind = "auto";  // "model", "cluster", or "auto": by the file's first field
};

// The first word of a config that is not in a comment: its first field, in text proto as in JSON.
std::string FirstWord(const std::string& path) {
  std::ifstream file(path);
  std::string word, line;
  while (word.empty() && std::getline(file, line)) {
    for (const char c : line.substr(0, line.find('#'))) {
      const bool in_word = absl::ascii_isalnum(c) || c == '_';
      if (in_word) word.push_back(c);
      if (!in_word && !word.empty()) break;
    }
  }
  return word;
}

bool IsCluster(const std::string& path, const std::string& kind) {
  if (kind != "auto") return kind == "cluster";
  return v1::ClusterConfig::descriptor()->FindFieldByName(FirstWord(path)) != nullptr ||
         v1::ClusterConfig::descriptor()->FindFieldByCamelcaseName(FirstWord(path)) != nullptr;
}

// The cluster that the largest table asks for, if it asks for more than one partition.
std::string Needs(const v1::ModelConfig& model) {
  int64_t rows = 0;
  for (const v1::TableConfig& table : model.tables()) {
    rows = std::max(rows, table.vocabulary_size());
  }
  int64_t partitions = 1;
  while (rows > partitions * preprocess::MaxRowsPerPartition(/*partitions=*/1)) partitions *= 2;
  return partitions == 1 ? ""
                         : absl::StrCat("; needs a cluster of at least ", partitions,
                                        " partitions (shards x SparseCores)");
}

absl::Status Validate(Session& session, const std::string& path, const std::string& kind) {
  const auto report = [&](const google::protobuf::Message& config, const std::string& summary) {
    if (session.json) {
      PrintJson(config, session.out);
    } else {
      session.out << path << ": valid " << summary << "\n";
    }
    return absl::OkStatus();
  };
  if (IsCluster(path, kind)) {
    ASSIGN_OR_RETURN(v1::ClusterConfig cluster, config::LoadCluster(path));
    return report(cluster, absl::StrCat("cluster: ", Counted(cluster.shards_size(), "shard"), " x ",
                                        Counted(cluster.sparsecores_per_shard(), "SparseCore"),
                                        ", ", Counted(cluster.coordinators_size(), "coordinator"),
                                        cluster.has_storage() ? ", checkpoints in " : "",
                                        cluster.storage().checkpoints()));
  }
  ASSIGN_OR_RETURN(v1::ModelConfig model, config::LoadModel(path));
  int64_t floats = 0;
  for (const v1::TableConfig& table : model.tables()) {
    floats += table.vocabulary_size() * table.embedding_dim();
  }
  return report(
      model, absl::StrCat("model \"", model.name(), "\": ", Counted(model.tables_size(), "table"),
                          ", ", Counted(model.features_size(), "feature"), ", ",
                          Counted(floats, "weight"), Needs(model)));
}

}  // namespace

void AddValidate(CLI::App& app, Session& session, Command& command) {
  auto options = std::make_shared<ValidateOptions>();
  CLI::App* validate =
      app.add_subcommand("validate", "Check a model or cluster config; needs no server");
  validate->add_option("FILE", options->path, "ModelConfig or ClusterConfig as text proto or JSON")
      ->required();
  validate->add_option("--kind", options->kind, "What FILE is")
      ->check(CLI::IsMember({"auto", "model", "cluster"}))
      ->capture_default_str();
  SetExample(validate, "emberctl validate cluster.textproto --kind cluster");
  validate->callback([options, &session, &command] {
    command = [options, &session] { return Validate(session, options->path, options->kind); };
  });
}

}  // namespace emberd::emberctl
