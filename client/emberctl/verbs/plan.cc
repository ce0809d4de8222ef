#include "preprocess/plan/plan.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"
#include "preprocess/batch/csr.h"

namespace emberd::emberctl {
namespace {

struct PlanOptions {
  std::string model;  // of a declared model; empty: `file`
  std::string file;
  ClusterShape cluster;
};

constexpr char kOwnMemory[] =
    " by default, from the memory of this machine (--cluster FILE may give another)";

// A model's plan and what one partition of its cluster may hold.
struct Planned {
  std::string model;
  v1::ModelPlan plan;
  int64_t partition_budget = 0;  // bytes; 0: unknown
  std::string missing_memory;    // MissingMemory
  bool own_memory = false;       // the budget is kOwnMemory
};

absl::StatusOr<Planned> PlanFile(const PlanOptions& options) {
  ASSIGN_OR_RETURN(v1::ModelConfig model, config::LoadModel(options.file));
  ASSIGN_OR_RETURN(const v1::ClusterConfig cluster, ClusterOf(options.cluster));
  ASSIGN_OR_RETURN(
      const preprocess::Plan plan,
      preprocess::MakePlan(model, {cluster.shards_size(), cluster.sparsecores_per_shard(),
                                   cluster.sparsecores_assumed()}));
  v1::ClusterConfig given;
  if (const std::string& path = options.cluster.file; !path.empty()) {
    ASSIGN_OR_RETURN(given, config::ReadCluster(path));
  }
  return Planned{model.name(), preprocess::PlanToProto(model, plan),
                 cluster.budgets().bytes_per_sparsecore(), "",
                 given.budgets().bytes_per_sparsecore() == 0};
}

absl::StatusOr<Planned> PlanOfDeclared(Session& session, const std::string& name) {
  ASSIGN_OR_RETURN(const v1::DescribeModelResponse model, session.DescribeModel(name));
  ASSIGN_OR_RETURN(const v1::GetStatusResponse cluster, session.GetStatus());
  Planned planned{model.config().name(), model.plan(), 0, MissingMemory(cluster)};
  for (const v1::ShardStatus& shard : cluster.shards()) {
    if (!shard.reachable()) continue;
    planned.partition_budget =
        shard.table_budget_bytes() / std::max(planned.plan.sparsecores_per_shard(), 1);
    break;
  }
  return planned;
}

// Bytes of weights and slots; partitions are alike.
int64_t PartitionBytes(const v1::ModelPlan& plan) {
  int64_t bytes = 0;
  for (const v1::StackPlan& stack : plan.stacks()) bytes += stack.bytes_per_partition();
  return bytes;
}

// Weights that somebody asked for, and cells that hold them: rows are padded for the partitions,
// columns for the width.
struct Padding {
  int64_t weights = 0;
  int64_t cells = 0;
};

Padding PaddingOf(const v1::StackPlan& stack, const v1::TablePlan& table) {
  return {table.vocabulary_size() * table.embedding_dim(),
          table.padded_vocabulary_size() * stack.embedding_dim()};
}

Padding PaddingOf(const v1::ModelPlan& plan) {
  Padding all;
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::TablePlan& table : stack.tables()) {
      const Padding one = PaddingOf(stack, table);
      all.weights += one.weights;
      all.cells += one.cells;
    }
  }
  return all;
}

void PrintMemory(const Planned& planned, std::ostream& out) {
  const int64_t partition_bytes = PartitionBytes(planned.plan);
  Table lines = {{"MEMORY OF", "SIZE", "BUDGET", "USED"}};
  const auto add = [&](const std::string& what, int64_t partitions) {
    const int64_t size = partition_bytes * partitions;
    const int64_t budget = planned.partition_budget * partitions;
    lines.push_back({what, Bytes(size), budget > 0 ? Bytes(budget) : "?", Percent(size, budget)});
  };
  add("a partition", 1);
  add("a shard", planned.plan.sparsecores_per_shard());
  add("the cluster", planned.plan.partitions());
  PrintColumns(lines, out);
  if (planned.own_memory) out << "budgets.bytes_per_sparsecore is that" << kOwnMemory << "\n";
  if (!planned.missing_memory.empty()) out << "warning: " << planned.missing_memory << "\n";
}

// Of the cells, that which is padding.
std::string Share(const Padding& padding) {
  return Percent(padding.cells - padding.weights, padding.cells);
}

void PrintPadding(const v1::ModelPlan& plan, std::ostream& out) {
  Table lines = {{"STACK", "TABLE", "ROWS", "PADDED", "DIM", "PADDED", "WEIGHTS", "PADDING"}};
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::TablePlan& table : stack.tables()) {
      const Padding padding = PaddingOf(stack, table);
      lines.push_back({stack.name(), table.name(), table.vocabulary_size(),
                       table.padded_vocabulary_size(), table.embedding_dim(), stack.embedding_dim(),
                       padding.weights, Share(padding)});
    }
  }
  PrintColumns(lines, out);
}

void Print(const Planned& planned, std::ostream& out) {
  const v1::ModelPlan& plan = planned.plan;
  const Padding padding = PaddingOf(plan);
  out << planned.model << ": " << Bytes(plan.table_bytes()) << " on " << SizeText(plan) << "; "
      << Counted(padding.weights, "weight") << ", " << Share(padding)
      << " of the cells are padding\n\n";
  PrintMemory(planned, out);
  out << "\n";
  PrintStacks(plan, out);
  out << "\n";
  PrintPadding(plan, out);
  out << "\n";
  PrintFeatures(plan, out);
  PrintWarnings(plan, out);
}

absl::Status PrintPlanJson(const Planned& planned, std::ostream& out) {
  const int64_t partition_bytes = PartitionBytes(planned.plan);
  const Padding padding = PaddingOf(planned.plan);
  const Json json = {{"model", planned.model},
                     {"plan", MessageJson(planned.plan)},
                     {"memory",
                      {{"partition_bytes", partition_bytes},
                       {"shard_bytes", partition_bytes * planned.plan.sparsecores_per_shard()},
                       {"total_bytes", planned.plan.table_bytes()},
                       {"partition_budget_bytes", planned.partition_budget}}},
                     {"padding", {{"weights", padding.weights}, {"cells", padding.cells}}}};
  return PrintJson(json, out);
}

absl::Status ShowPlan(Session& session, const PlanOptions& options) {
  ASSIGN_OR_RETURN(const Planned planned, options.file.empty()
                                              ? PlanOfDeclared(session, options.model)
                                              : PlanFile(options));
  if (session.json) {
    RETURN_IF_ERROR(PrintPlanJson(planned, session.out));
  } else {
    Print(planned, session.out);
  }
  const int64_t needed = PartitionBytes(planned.plan);
  if (planned.partition_budget == 0 || needed <= planned.partition_budget) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      planned.model, ": a partition needs ", needed, " bytes; budgets.bytes_per_sparsecore is ",
      planned.partition_budget, planned.own_memory ? kOwnMemory : "", ", so ",
      needed - planned.partition_budget,
      " bytes do not fit if every row is touched. Raise the budget if the machines have "
      "the memory, add shards, or store rows in 16 bits"));
}

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

absl::Status Validate(Session& session, const ValidateOptions& options) {
  const auto report = [&](const google::protobuf::Message& config, const std::string& summary) {
    return session.Answer(config, absl::StrCat(options.path, ": valid ", summary));
  };
  if (IsCluster(options.path, options.kind)) {
    ASSIGN_OR_RETURN(v1::ClusterConfig cluster, config::LoadCluster(options.path));
    return report(cluster, absl::StrCat("cluster: ", Counted(cluster.shards_size(), "shard"), " x ",
                                        Counted(cluster.sparsecores_per_shard(), "SparseCore"),
                                        ", ", Counted(cluster.coordinators_size(), "coordinator"),
                                        cluster.has_storage() ? ", checkpoints in " : "",
                                        cluster.storage().checkpoints()));
  }
  ASSIGN_OR_RETURN(v1::ModelConfig model, config::LoadModel(options.path));
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

void AddPlan(CLI::App& app, Session& session) {
  auto [plan, options] = AddVerb(
      app, session, "plan",
      "Show where the tables of a model lie, what they need of the memory budget, their limits and "
      "their padding. With --model, of a file, for a cluster that need not run; with MODEL, of a "
      "declared one (see `describe` for its config). Exit status 1 if it does not fit",
      "emberctl plan --model model.textproto --shards 4 --sparsecores 2", ShowPlan);
  CLI::Option_group* subject = plan->add_option_group("subject");
  subject->add_option("MODEL", options->model, "Name of a declared model");
  CLI::Option* file =
      subject->add_option("--model", options->file, "ModelConfig as text proto or JSON");
  subject->require_option(1);
  AddClusterShapeOptions(plan, file, &options->cluster);
}

void AddValidate(CLI::App& app, Session& session) {
  auto [validate, options] =
      AddVerb(app, session, "validate", "Check a model or cluster config; needs no server",
              "emberctl validate cluster.textproto --kind cluster", Validate);
  validate->add_option("FILE", options->path, "ModelConfig or ClusterConfig as text proto or JSON")
      ->required();
  validate->add_option("--kind", options->kind, "What FILE is")
      ->check(CLI::IsMember({"auto", "model", "cluster"}))
      ->capture_default_str();
}

}  // namespace emberd::emberctl
